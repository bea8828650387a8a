"""Annotation files beside media: LLaVA's JSON with a folder of images, and JSONL manifests of sounds or videos."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from entrain_bench.base.arrays import IntArray

from .blocks import Block, blocks_of, record_ends, records_of
from .fields import Fields, FieldSource
from .files import DataFile
from .interface import BadRecord, BadSampleError, Limits, RawSample, Reason, Shard
from .recent import Recent

# Records of each of so many files that fields are found by.
_HEAD_RECORDS = 1000
_HEAD_FILES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSource(FieldSource):
    """Records of JSON arrays, or of files with a record a line; ``id`` is the field that messages name them by.

    ``root`` is the folder of the media that records name; empty: that of the annotation file.
    """

    ENDINGS: ClassVar[Sequence[str]] = (".json", ".jsonl")
    SPARSE: ClassVar[bool] = True

    root: str = ""
    id: str | None = None

    def shards(self) -> list[Shard]:
        """Blocks of records; ``UserError`` for no files."""
        return [
            Shard(file.label, block.first, file.version, str(file.path), (block.start, block.stop))
            for file in self.files()
            for block in blocks_of(file.path)
        ]

    def head(self) -> tuple[list[str], list[Mapping[str, Any]]]:
        """The names of the fields of the first records of the first files, and these records."""
        found: list[Mapping[str, Any]] = []
        for file in self.files()[:_HEAD_FILES]:
            for block in islice(blocks_of(file.path), 1):
                records = islice(records_of(file.path, block), _HEAD_RECORDS)
                found += [record for record in records if isinstance(record, Mapping)]
        return list(dict.fromkeys(str(name) for record in found for name in record)), found

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
        if not isinstance(record, Mapping):
            what = str(record) if isinstance(record, ValueError) else "no mapping"
            return BadRecord(key, BadSampleError(Reason.RECORD, what))
        if self.id and self.id in record:
            key = f"{key} ({record[self.id]})"
        return fields.record(key, record)

    def fields_of(self, path: Path) -> Fields:
        """The fields of a file's records."""
        return self.fields(self.root or str(path.parent))


@dataclass(frozen=True, slots=True)
class RecordReader:
    """Records of a file by their numbers; ``ends`` of each in bytes ``[records]``."""

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
