"""Annotation files beside media: LLaVA's JSON with a folder of images, and JSONL manifests of sounds or videos."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entrain_bench.base.arrays import IntArray

from ..take import ALL, Take
from .blocks import Block, blocks_of, record_ends, records_of
from .fields import Fields
from .files import DataFile, data_files
from .interface import BadRecord, BadSampleError, Limits, RawSample, Reason, Shard
from .recent import Recent


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSource:
    """Records of JSON arrays, or of files with a record a line.

    Attributes:
        path: a file, a folder or a pattern.
        root: folder of the media that records name; empty: that of the annotation file.
        text: fields of text, or of turns of a conversation.
        images: field of an image or several: file names, or ``{width: ..., height: ...}``; null: none.
        audio: field of a sound; null: none.
        video: field of a video; null: none.
        seconds: field with the length of audio or video; where a record has it, no file is opened, and the size of a
            video's frames is that of its ``width`` and ``height``.
        id: field that messages name records by; null: their numbers.
        take: which of the files, by their order: ``all``, ``first:10``, ``first:5%``.
    """

    path: str
    root: str = ""
    text: Sequence[str] | str = ()
    images: str | None = None
    audio: str | None = None
    video: str | None = None
    seconds: str | None = None
    id: str | None = None
    take: str = ALL

    def __post_init__(self) -> None:
        self._fields("")
        Take.parse(self.take, "source.take")

    def shards(self) -> list[Shard]:
        """Blocks of records.

        Raises:
            UserError: for no files.
        """
        return [
            Shard(file.label, block.first, file.version, str(file.path), (block.start, block.stop))
            for file in self.files()
            for block in blocks_of(file.path)
        ]

    def files(self) -> list[DataFile]:
        """All files.

        Raises:
            UserError: if there are none.
        """
        return data_files(self.path, (".json", ".jsonl"), Take.parse(self.take, "source.take"))

    def reader(self, file: DataFile, kept: Recent[Any]) -> RecordReader:  # noqa: ARG002
        """Reads records by their numbers."""
        return RecordReader(self, file.path, record_ends(file.path))

    def samples(self, shard: Shard, limits: Limits) -> Iterator[RawSample | BadRecord]:  # noqa: ARG002
        """The records of a block."""
        path = Path(shard.place)
        fields = self.fields_of(path)
        for number, record in enumerate(records_of(path, Block(shard.first, *shard.part)), shard.first):
            yield self.sample(number, record, fields)

    def sample(self, number: int, record: object, fields: Fields) -> RawSample | BadRecord:
        """The sample of a record."""
        key = f"record {number + 1}"
        try:
            if isinstance(record, ValueError) or not isinstance(record, Mapping):
                what = str(record) if isinstance(record, ValueError) else "no mapping"
                raise BadSampleError(Reason.RECORD, what)
            if self.id and self.id in record:
                key = f"{key} ({record[self.id]})"
            return fields.sample(key, record)
        except BadSampleError as error:
            return BadRecord(key, error)

    def fields_of(self, path: Path) -> Fields:
        """The fields of a file's records."""
        return self._fields(self.root or str(path.parent))

    def _fields(self, root: str) -> Fields:
        return Fields.of(self.text, self.images, self.audio, self.video, self.seconds, root)


@dataclass(frozen=True, slots=True)
class RecordReader:
    """Records of a file by their numbers.

    Attributes:
        source: whose file it is.
        path: of the file.
        ends: of each record, in bytes ``[records]``.
    """

    source: RecordSource
    path: Path
    ends: IntArray

    def record(self, number: int, limits: Limits, *, text_only: bool = False) -> RawSample | BadRecord:  # noqa: ARG002
        """A record, which alone is read."""
        if not 0 <= number < len(self.ends):
            raise BadSampleError(Reason.FILE, f"{self.path.name} has no record {number + 1}")
        start = int(self.ends[number - 1]) if number else 0
        found = next(iter(records_of(self.path, Block(number, start, int(self.ends[number])))), None)
        fields = self.source.fields_of(self.path).reading(text_only=text_only)
        return self.source.sample(number, found, fields)
