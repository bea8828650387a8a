"""Parquet files with a row per sample, as FineVision's: ``images`` (a list) and ``texts`` (a list of turns).

Read by pyarrow, which reads some columns of some rows at a time: a shard of gigabytes takes megabytes of memory, unless
a row does not. How many rows are read at a time follows from the bytes that the rows before took in memory, for those
that a file states count a value that repeats once.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from entrain_bench.base.errors import UserError

from ..budget import BUDGET
from .fields import Fields, FieldSource
from .files import DataFile
from .interface import BadRecord, BadSampleError, Limits, RawSample, Reason, Shard, over_budget
from .recent import Recent

# Bytes of row groups that are scanned in one go, as the file states them.
_SHARD_BYTES = 256 * 2**20
# Rows that are read at a time, of which more are no faster, and the bytes that they should not exceed.
_PIECE_ROWS = 32
_PIECE_BYTES = 4 * 2**20
# Rows that are kept together, and their bytes, but for the last piece.
_BATCH_ROWS = 1024
_BATCH_BYTES = 16 * 2**20
_BUFFER_BYTES = 2**20


# Rows that fields are found by.
_HEAD_ROWS = 32
# What an entry of a list takes while Arrow reads it, for each of its values, and as an object of Python's.
_ENTRY_BYTES = 36
_OBJECT_BYTES = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetSource(FieldSource):
    """Rows of Parquet files; images are structs with ``bytes``, or ``path`` below ``root`` (empty: no files)."""

    ENDINGS: ClassVar[Sequence[str]] = (".parquet",)

    root: str = ""

    def shards(self) -> list[Shard]:
        """Row groups of files, together up to 256 MiB; ``UserError`` for no files, and if the first lacks a column."""
        shards = list[Shard]()
        checked = False
        for file in self.files():
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

    def head(self) -> tuple[list[str], list[dict[str, Any]]]:
        """The names of the columns of the first file that can be read, and, of its first rows, texts and content."""
        for file in self.files():
            with suppress(pa.ArrowException, OSError, UnicodeDecodeError), pq.ParquetFile(file.path) as opened:
                schema = opened.schema_arrow
                rows = list[dict[str, Any]]()
                held = [field.name for field in schema if re.search("string|binary", str(field.type))]
                # Its scan will say what is wrong.
                with suppress(BadSampleError):
                    for group in range(min(1, opened.num_row_groups)):
                        rows += islice(_rows_of(opened, group, held), _HEAD_ROWS)
                return schema.names, rows
        return [], []

    def reader(self, file: DataFile, kept: Recent[Any]) -> ParquetReader:
        """Reads rows by their numbers."""
        return ParquetReader.of(file.path, self.fields(self.root), kept)

    def samples(self, shard: Shard, limits: Limits) -> Iterator[RawSample | BadRecord]:  # noqa: ARG002
        """The rows of a shard."""
        fields = self.fields(self.root)
        (first, last) = shard.part
        # Without a buffer it reads a row group's column whole.
        with pq.ParquetFile(shard.place, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
            groups = range(first, last or file.metadata.num_row_groups)
            rows = (row for group in groups for row in _rows_of(file, group, fields.names))
            for number, row in enumerate(rows, shard.first):
                yield fields.record(f"row {number + 1}", row)

    def _check(self, names: Sequence[str], path: Path) -> None:
        missing = [name for name in self.fields().names if name not in names]
        if missing:
            raise UserError(
                f"source: {path} has no column {missing[0]}; columns: {', '.join(names)} "
                "(source.text, source.images, source.audio, source.video name them, null: none)"
            )


def _rows_of(file: pq.ParquetFile, group: int, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for piece in _pieces(file, group, names):
        needed = sum(map(_unpacked_bytes, piece.columns))
        BUDGET.ask(needed, f"{len(piece)} rows of row group {group + 1}", over_budget)
        yield from piece.to_pylist()


def _pieces(file: pq.ParquetFile, group: int, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """A row group some rows at a time: at first one, then as many as ``_PIECE_BYTES`` hold of rows like the last."""
    held = file.schema_arrow.names
    if missing := [name for name in names if name not in held]:
        raise BadSampleError(Reason.FILE, f"no column {missing[0]}")
    metadata = file.metadata.row_group(group)
    chunks = [metadata.column(number) for number in range(metadata.num_columns)]
    values = sum(chunk.num_values for chunk in chunks if chunk.path_in_schema.partition(".")[0] in names)
    # Every row has a value of each column at least; all others may be one row's.
    most = max(0, values - metadata.num_rows * len(names))
    what = f"row group {group + 1}: a row of up to {most:,} list entries (write smaller row groups)"
    BUDGET.ask(most * _ENTRY_BYTES, what, over_budget)
    for piece in file.iter_batches(1, row_groups=[group], columns=list(names), use_threads=False):
        # A name would hold the piece while the next is read.
        rows = len(piece)
        fit = _PIECE_BYTES * rows // max(1, piece.nbytes)
        yield piece
        del piece
        file.reader.set_batch_size(max(1, min(_PIECE_ROWS, 2 * rows, fit)))


def _unpacked_bytes(values: pa.Array) -> int:
    """Upper bound of the bytes that values take as Python objects."""
    kind = values.type
    if pa.types.is_dictionary(kind):
        longest = max(map(len, filter(None, values.dictionary.to_pylist())), default=0)
        return len(values) * (_OBJECT_BYTES + longest)
    if pa.types.is_struct(kind):
        return _OBJECT_BYTES * len(values) + sum(map(_unpacked_bytes, values.flatten()))
    if pa.types.is_nested(kind) and hasattr(values, "flatten"):
        return _OBJECT_BYTES * len(values) + _unpacked_bytes(values.flatten())
    return _OBJECT_BYTES * len(values) + int(values.nbytes)


def _batches(file: pq.ParquetFile, group: int, names: Sequence[str]) -> Iterator[pa.Table]:
    """A row group in batches of some megabytes."""
    held = list[pa.RecordBatch]()
    rows = 0
    size = 0
    for piece in _pieces(file, group, names):
        held.append(piece)
        rows = rows + len(piece)
        size = size + piece.nbytes
        if rows >= _BATCH_ROWS or size >= _BATCH_BYTES:
            batch = pa.Table.from_batches(held)
            held = []
            rows = 0
            size = 0
            yield batch
            del batch
    if held:
        yield pa.Table.from_batches(held)


@dataclass(frozen=True, slots=True)
class ParquetReader:
    """Rows by their numbers: the part of a row group up to a row is read, and its last batch kept.

    ``ends`` are the numbers of the rows behind each row group.
    """

    path: Path
    fields: Fields
    metadata: pq.FileMetaData
    ends: list[int]
    kept: Recent[tuple[int, pa.Table]]

    @classmethod
    def of(cls, path: Path, fields: Fields, kept: Recent[Any]) -> ParquetReader:
        """A reader of a file."""
        metadata = pq.read_metadata(path)
        rows = (metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
        return cls(path, fields, metadata, list(accumulate(rows)), kept)

    def record(self, number: int, limits: Limits, *, text_only: bool = False) -> RawSample | BadRecord:  # noqa: ARG002
        """A row; columns that are not wanted are not read."""
        if not 0 <= number < (self.ends[-1] if self.ends else 0):
            raise BadSampleError(Reason.FILE, f"{self.path.name} has no row {number + 1}")
        group = bisect_right(self.ends, number)
        within = number - (self.ends[group - 1] if group else 0)
        fields = self.fields.reading(text_only=text_only)
        start, batch = self._batch(group, within, fields)
        row = batch.slice(within - start, 1)
        needed = sum(_unpacked_bytes(chunk) for column in row.columns for chunk in column.chunks)
        BUDGET.ask(needed, "it", over_budget)
        return fields.record(f"row {number + 1}", row.to_pylist()[0])

    def _batch(self, group: int, row: int, fields: Fields) -> tuple[int, pa.Table]:
        """The batch of a row group that has a row, and the number of its first."""
        key = (self.path, group, fields.names)
        if (found := self.kept.find(key)) and found[0] <= row < found[0] + len(found[1]):
            return found
        start = 0
        with pq.ParquetFile(self.path, metadata=self.metadata, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
            for batch in _batches(file, group, fields.names):
                if row < start + len(batch):
                    self.kept.put(key, (start, batch), batch.nbytes)
                    return start, batch
                start += len(batch)
                del batch
        raise BadSampleError(Reason.FILE, f"{self.path.name} ends within row group {group + 1}")


def _row_groups(metadata: Any) -> Iterator[tuple[int, int, int]]:
    """Row groups from and up to, together of a size worth a job, and the number of the first row."""
    first = row = rows = size = 0
    for group in range(metadata.num_row_groups):
        held = metadata.row_group(group)
        if group > first and size + held.total_byte_size > _SHARD_BYTES:
            yield first, group, row
            first = group
            row = rows
            size = 0
        size += held.total_byte_size
        rows += held.num_rows
    yield first, metadata.num_row_groups, row
