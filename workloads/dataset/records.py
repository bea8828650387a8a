"""Annotation files beside media: LLaVA's JSON with a folder of images, and JSONL manifests of sounds or videos."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..take import ALL, Take
from .blocks import Block, blocks_of, records_of
from .fields import Fields
from .files import data_files
from .interface import BadRecord, BadSampleError, Limits, RawSample, Reason, Shard


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
        files = data_files(self.path, (".json", ".jsonl"), Take.parse(self.take, "source.take"))
        return [
            Shard(file.label, block.first, file.version, str(file.path), (block.start, block.stop))
            for file in files
            for block in blocks_of(file.path)
        ]

    def samples(self, shard: Shard, limits: Limits) -> Iterator[RawSample | BadRecord]:  # noqa: ARG002
        """The records of a block."""
        path = Path(shard.place)
        fields = self._fields(self.root or str(path.parent))
        for number, record in enumerate(records_of(path, Block(shard.first, *shard.part)), shard.first):
            key = f"record {number + 1}"
            try:
                if isinstance(record, ValueError) or not isinstance(record, Mapping):
                    what = str(record) if isinstance(record, ValueError) else "no mapping"
                    raise BadSampleError(Reason.RECORD, what)
                if self.id and self.id in record:
                    key = f"{key} ({record[self.id]})"
                yield fields.sample(key, record)
            except BadSampleError as error:
                yield BadRecord(key, error)

    def _fields(self, root: str) -> Fields:
        return Fields.of(self.text, self.images, self.audio, self.video, self.seconds, root)
