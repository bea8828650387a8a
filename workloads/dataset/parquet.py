"""Parquet files with a row per sample, as FineVision's: ``images`` (a list) and ``texts`` (a list of turns).

Read by pyarrow, which reads some columns of some rows at a time: a shard of gigabytes takes megabytes of memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from entrain_bench.errors import UserError

from ..take import ALL, Take
from .fields import Fields
from .files import data_files
from .interface import BadRecord, BadSampleError, Limits, RawSample, Reason, Shard

# Bytes of rows that are in memory at a time, about; and of row groups that are scanned in one go.
_BATCH_BYTES = 16 * 2**20
_SHARD_BYTES = 256 * 2**20
_MAX_BATCH = 1024
_BUFFER_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetSource:
    """Rows of Parquet files.

    Attributes:
        path: a file, a folder or a pattern.
        text: columns of text, or of turns of a conversation.
        images: column of images: structs with ``bytes``, or ``path`` below ``root``; null: none.
        audio: column of sounds, likewise.
        video: column of videos, likewise.
        seconds: column with the length of audio or video.
        root: folder of the files that rows name.
        take: which of the files, by their order: ``all``, ``first:10``, ``first:5%``.
    """

    path: str
    text: Sequence[str] | str = ()
    images: str | None = None
    audio: str | None = None
    video: str | None = None
    seconds: str | None = None
    root: str = ""
    take: str = ALL

    def __post_init__(self) -> None:
        self._fields()
        Take.parse(self.take, "source.take")

    def shards(self) -> list[Shard]:
        """Row groups of files, together up to 256 MiB.

        Raises:
            UserError: for no files, and if the first that can be read lacks a column.
        """
        shards, checked = list[Shard](), False
        for file in data_files(self.path, (".parquet",), Take.parse(self.take, "source.take")):
            try:
                with pq.ParquetFile(file.path) as opened:
                    if not checked:
                        self._check(opened.schema_arrow.names, file.path)
                        checked = True
                    parts = list(_row_groups(opened.metadata))
            # Its scan will say what is wrong.
            except (pa.ArrowException, OSError, UnicodeDecodeError):
                parts = [(0, 0, 0)]
            place = str(file.path)
            shards += [Shard(file.label, row, file.version, place, (first, last)) for first, last, row in parts]
        return shards

    def samples(self, shard: Shard, limits: Limits) -> Iterator[RawSample | BadRecord]:  # noqa: ARG002
        """The rows of a shard."""
        fields = self._fields()
        for number, row in enumerate(_rows(shard, fields), shard.first):
            key = f"row {number + 1}"
            try:
                yield fields.sample(key, row)
            except BadSampleError as error:
                yield BadRecord(key, error)

    def _fields(self) -> Fields:
        return Fields.of(self.text, self.images, self.audio, self.video, self.seconds, self.root)

    def _check(self, names: Sequence[str], path: Path) -> None:
        missing = [name for name in self._fields().names if name not in names]
        if missing:
            raise UserError(
                f"source: {path} has no column {missing[0]}; columns: {', '.join(names)} "
                "(source.text, source.images, source.audio, source.video name them, null: none)"
            )


def _rows(shard: Shard, fields: Fields) -> Iterator[dict[str, Any]]:
    first, last = shard.part
    # Without a buffer it reads a row group's column whole.
    with pq.ParquetFile(shard.place, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
        names = file.schema_arrow.names
        columns = [name for name in fields.names if name in names]
        if len(columns) < len(fields.names):
            raise BadSampleError(Reason.FILE, f"no column {next(name for name in fields.names if name not in names)}")
        for group in range(first, last or file.metadata.num_row_groups):
            held = file.metadata.row_group(group)
            row_bytes = max(1, held.total_byte_size // max(1, held.num_rows))
            size = max(1, min(_MAX_BATCH, _BATCH_BYTES // row_bytes))
            for batch in file.iter_batches(size, row_groups=[group], columns=columns, use_threads=False):
                yield from batch.to_pylist()


def _row_groups(metadata: Any) -> Iterator[tuple[int, int, int]]:
    """Row groups from and up to, together of a size worth a job, and the number of the first row."""
    first = row = rows = size = 0
    for group in range(metadata.num_row_groups):
        held = metadata.row_group(group)
        if group > first and size + held.total_byte_size > _SHARD_BYTES:
            yield first, group, row
            first, row, size = group, rows, 0
        size += held.total_byte_size
        rows += held.num_rows
    yield first, metadata.num_row_groups, row
