"""Parquet files with a row per sample, as FineVision's: ``images`` (a list) and ``texts`` (a list of turns).

pyarrow reads a few rows at a time, so that a shard of gigabytes takes megabytes of memory.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, islice
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from ..budget import BUDGET
from .fields import Fields, FileSource, Row
from .files import DataFile
from .interface import BadSampleError, Limits, Reason, Shard, over_budget

# Bytes of row groups that are scanned in one go, as the file states them.
_SHARD_BYTES = 256 * 2**20
# Rows of a batch, and their bytes by the average row of a row group.
_BATCH_ROWS = 32
_BATCH_BYTES = 4 * 2**20
# What random access keeps.
_KEPT_BATCHES = 64
_KEPT_BYTES = 128 * 2**20
_BUFFER_BYTES = 2**20
# Rows that fields are found by.
_HEAD_ROWS = 32
# Bytes that an entry of a list takes at least as an object of Python: a pointer and a short text.
_ENTRY_BYTES = 64
_UNREADABLE = (pa.ArrowException, OSError, UnicodeDecodeError)


@dataclass(frozen=True, kw_only=True)
class ParquetSource(FileSource):
    """Rows of Parquet files; images are structs with ``bytes``, or ``path`` below ``root`` (empty: no files)."""

    ENDINGS: ClassVar[Sequence[str]] = (".parquet",)

    root: str = ""

    def fields_at(self, place: str = "") -> Fields:
        """Return the columns that are read."""
        return replace(super().fields_at(place), root=self.root)

    def shards(self) -> list[Shard]:
        """Return row groups, together up to 256 MiB; ``UserError`` for no files, and if the first lacks a column."""
        shards = list[Shard]()
        checked = False
        for file in self.files():
            parts = [(0, 0, 0)]
            # The scan reports a file that cannot be read.
            with suppress(*_UNREADABLE), pq.ParquetFile(file.path) as opened:
                if not checked:
                    self.check_columns(opened.schema_arrow.names, file.path)
                    checked = True
                parts = [*_parts(opened.metadata)]
            place = str(file.path)
            shards += [Shard(file.label, row, file.version, place, (first, last)) for first, last, row in parts]
        return shards

    def head(self) -> tuple[list[str], list[Row]]:
        """Return the columns of the first file that can be read, and texts and content of its first rows."""
        for file in self.files():
            with suppress(*_UNREADABLE), pq.ParquetFile(file.path) as opened:
                schema = opened.schema_arrow
                rows = list[Row]()
                held = [field.name for field in schema if re.search("string|binary", str(field.type))]
                # The scan reports rows that are beyond the budget.
                with suppress(BadSampleError, MemoryError), BUDGET.held():
                    for group in range(min(1, opened.num_row_groups)):
                        batches = _batches(opened, group, held)
                        rows += islice((row for batch in batches for row in batch.to_pylist()), _HEAD_ROWS)
                return schema.names, rows
        return [], []

    def rows(self, shard: Shard, limits: Limits) -> Iterator[tuple[str, Row]]:  # noqa: ARG002
        """Read the rows of a shard."""
        names = self.fields_at().names
        first, last = shard.part
        number = shard.first
        # Without a buffer it reads a row group's column whole.
        with pq.ParquetFile(shard.place, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
            for group in range(first, last or file.metadata.num_row_groups):
                for batch in _batches(file, group, names):
                    for row in batch.to_pylist():
                        number += 1
                        yield f"row {number}", row

    def row(
        self,
        file: DataFile,
        number: int,
        names: Sequence[str],
        limits: Limits,  # noqa: ARG002
    ) -> tuple[str, Row]:
        """Read one row; its row group is read up to that row, and its last batches are kept."""
        start, batch = _batch_with(file, number, tuple(names))
        return f"row {number + 1}", batch.slice(number - start, 1).to_pylist()[0]


def _batches(file: pq.ParquetFile, group: int, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Read columns of a row group a batch at a time; ``BadSampleError`` if its lists are beyond the budget."""
    held = file.schema_arrow.names
    if missing := [name for name in names if name not in held]:
        raise BadSampleError(Reason.FILE, f"no column {missing[0]}")
    metadata = file.metadata.row_group(group)
    chunks = [metadata.column(number) for number in range(metadata.num_columns)]
    values = sum(chunk.num_values for chunk in chunks if chunk.path_in_schema.partition(".")[0] in names)
    # Each row has at least one value of each column; one row may have all the others.
    most = max(0, values - metadata.num_rows * len(names))
    what = f"row group {group + 1}: a row of up to {most:,} list entries (write smaller row groups)"
    BUDGET.ask(most * _ENTRY_BYTES, what, over_budget)
    fit = _BATCH_BYTES * metadata.num_rows // max(1, metadata.total_byte_size)
    rows = min(_BATCH_ROWS, max(1, fit))
    yield from file.iter_batches(rows, row_groups=[group], columns=list(names), use_threads=False)


# File, columns, first row and rows of each batch, the last ones that random access has read.
_kept = deque[tuple[DataFile, tuple[str, ...], int, pa.RecordBatch]](maxlen=_KEPT_BATCHES)


def _batch_with(file: DataFile, number: int, names: tuple[str, ...]) -> tuple[int, pa.RecordBatch]:
    """Return a batch with a row, and the number of its first row."""
    for known, columns, start, batch in _kept:
        if (known, columns) == (file, names) and start <= number < start + len(batch):
            return start, batch
    metadata = _metadata(file)
    groups = (metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
    starts = list(accumulate(groups, initial=0))
    if not 0 <= number < starts[-1]:
        raise BadSampleError(Reason.FILE, f"{file.path.name} has no row {number + 1}")
    group = bisect_right(starts, number) - 1
    start = starts[group]
    with pq.ParquetFile(file.path, metadata=metadata, buffer_size=_BUFFER_BYTES, pre_buffer=False) as opened:
        for batch in _batches(opened, group, names):
            _kept.append((file, names, start, batch))
            while sum(kept.nbytes for *_, kept in _kept) > _KEPT_BYTES:
                _kept.popleft()
            if number < start + len(batch):
                return start, batch
            start += len(batch)
    raise BadSampleError(Reason.FILE, f"{file.path.name} ends within row group {group + 1}")


@lru_cache(maxsize=1024)
def _metadata(file: DataFile) -> Any:
    return pq.read_metadata(file.path)


def _parts(metadata: Any) -> Iterator[tuple[int, int, int]]:
    """Yield the first and the stop row group of parts of a size worth a job, and the number of the first row."""
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
