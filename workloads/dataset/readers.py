"""Readers of files that hold rows: Parquet, Arrow, JSON and tables."""

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from entrain_bench.base.arrays import IntArray
from entrain_bench.base.errors import UserError

from ..budget import BUDGET
from .conventions import KINDS, Chosen, kind_of, roles_of, table_of
from .fields import UNREAD, Row
from .source import BadSampleError, Limits, Reason, Shard, over_budget

# Rows of a batch, and their bytes by the average row of a row group of Parquet.
_BATCH_ROWS = 32
_BATCH_BYTES = 4 * 2**20
_BUFFER_BYTES = 2**20
# Bytes that an entry of a list takes at least as an object of Python: a pointer and a short text.
_ENTRY_BYTES = 64
# JSON: bytes that are read at a time, and the longest record: a byte takes up to 32 bytes as Python objects.
_READ_BYTES = 2**20
MAX_RECORD_BYTES = BUDGET.num_bytes // 32
_BOM = b"\xef\xbb\xbf"
_GAP = re.compile("(?:\xef\xbb\xbf)?[\\s,[]*")
COMPRESSED = (".gz", ".zst", ".bz2")

type Rows = Iterator[Row | list[Any] | BadSampleError]
# Places of a file at which reading may start or must stop, and the numbers of the rows there ``[starts + 1]`` each.
type Index = tuple[IntArray, IntArray]


def _opened(place: str) -> IO[bytes]:
    """Open a file, whose ending may say that it is compressed."""
    return io.BufferedReader(pa.input_stream(place, compression="detect"))


@lru_cache(maxsize=1024)
def parquet_index(file: Shard) -> Index | None:
    """Return the row groups; None for a damaged file, which the scan reports."""
    with suppress(pa.ArrowException, OSError, UnicodeDecodeError):
        metadata = pq.read_metadata(file.place)
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        return np.arange(len(rows) + 1), np.cumsum([0, *rows])
    return None


def parquet_rows(shard: Shard, chosen: Chosen, limits: Limits) -> Rows:  # noqa: ARG001
    """Read row groups; ``BadSampleError`` if a column is missing, or lists are beyond the budget."""
    # Without a buffer it reads a row group's column whole.
    with pq.ParquetFile(shard.place, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
        columns = {field.name: str(field.type) for field in file.schema_arrow}
        given = {name.partition(".")[0] for name in chosen.names}
        if missing := sorted(given - columns.keys()):
            raise BadSampleError(Reason.FILE, f"it has no field {missing[0]}; fields: {', '.join(columns)}")
        table = table_of(chosen.conventions)
        known = {*table.names(*KINDS), *table.paths, *roles_of(tuple(columns), chosen), *given, "width", "height"}
        # A struct of a text and bytes with an unknown name is not read.
        unread = {name: UNREAD for name, kind in columns.items() if "binary" in kind and name not in known}
        names = [name for name, kind in columns.items() if name not in unread and (name in known or "string" in kind)]
        for group in range(*(shard.part or [file.num_row_groups])):
            rows = _batch_rows(file.metadata.row_group(group), group, names)
            for batch in file.iter_batches(rows, row_groups=[group], columns=names, use_threads=False):
                yield from (unread | row for row in batch.to_pylist())


def _batch_rows(group: Any, number: int, names: Sequence[str]) -> int:
    """Return how many rows of a row group to read at a time; ``BadSampleError`` if its lists are beyond the budget."""
    chunks = [group.column(index) for index in range(group.num_columns)]
    values = sum(chunk.num_values for chunk in chunks if chunk.path_in_schema.partition(".")[0] in names)
    # Each row has at least one value of each column; one row may have all the others.
    most = max(0, values - group.num_rows * len(names))
    what = f"row group {number + 1}: a row of up to {most:,} list entries (write smaller row groups)"
    BUDGET.ask(most * _ENTRY_BYTES, what, over_budget)
    return min(_BATCH_ROWS, max(1, _BATCH_BYTES * int(group.num_rows) // max(1, int(group.total_byte_size))))


def arrow_rows(shard: Shard, chosen: Chosen, limits: Limits) -> Rows:  # noqa: ARG001
    """Read batches of an Arrow file or stream, such as those of datasets' ``save_to_disk``."""
    with pa.memory_map(shard.place) as file:
        try:
            batches = iter(pa.ipc.open_stream(file))
        except pa.ArrowInvalid:
            reader = pa.ipc.open_file(file)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        for batch in batches:
            for start in range(0, len(batch), _BATCH_ROWS):
                yield from batch.slice(start, _BATCH_ROWS).to_pylist()


def table_rows(shard: Shard, chosen: Chosen, limits: Limits) -> Rows:  # noqa: ARG001
    """Read a table whose first row names the columns."""
    delimiter = "\t" if ".tsv" in Path(shard.place).name.lower() else ","
    before = csv.field_size_limit(MAX_RECORD_BYTES)
    try:
        with _opened(shard.place) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
            yield from csv.DictReader(text, delimiter=delimiter, restkey="more", strict=True)
    finally:
        csv.field_size_limit(before)


@lru_cache(maxsize=1024)
def json_index(file: Shard) -> Index | None:
    """Return where records end, in bytes; ``UserError`` for an array that is no JSON, and a record too long."""
    if _layout(file.place, file.version) == "object":
        # Refused before the scan, if it is.
        _records_of_object(file)
        return None
    if file.place.endswith(COMPRESSED):
        return None
    ends = np.array([0, *(end for end, _ in _records(file, 0))], np.int64)
    return ends, np.arange(len(ends))


def json_rows(shard: Shard, chosen: Chosen, limits: Limits) -> Rows:  # noqa: ARG001
    """Read the records of an array, of lines, or of the list in an object."""
    if _layout(shard.place, shard.version) == "object":
        yield from _records_of_object(shard)
        return
    start, stop = shard.part or (0, None)
    for end, record in _records(shard, start):
        yield parsed(record)
        if end == stop:
            return


@lru_cache(maxsize=1024)
def _layout(place: str, version: str) -> str:  # noqa: ARG001
    """Return how a file of JSON is laid out: array, lines, or one object, which is a row or holds rows."""
    with _opened(place) as file:
        lines = (line.removeprefix(_BOM).strip() for line in iter(partial(file.readline, MAX_RECORD_BYTES), b""))
        first, second = (next(filter(None, lines), b"")[:1] for _ in range(2))
    if first == b"[":
        return "lines" if second == b"[" else "array"
    # Behind the first line of an object is a key, its end, or nothing.
    is_object = first == b"{" and second in (b"", b'"', b"}")
    return "object" if is_object and ".json" in Path(place).suffixes else "lines"


def _records_of_object(shard: Shard) -> list[Row]:
    """Return an object that is a row, or the records of its one list; ``UserError`` if it is neither or too large."""
    where = f"source.path={shard.place}"
    with _opened(shard.place) as file:
        content = file.read(MAX_RECORD_BYTES + 1)
    if len(content) > MAX_RECORD_BYTES:
        raise UserError(f"{where}: one JSON object of more than {MAX_RECORD_BYTES} bytes; write its records as JSONL")
    values = parsed(content)
    if not isinstance(values, dict):
        raise UserError(f"{where}: {values}")
    is_row = any(each.fits(tuple(values)) for each in table_of(None).conventions.values())
    if values and not is_row and all(isinstance(each, dict) for each in values.values()):
        # Records by key, which may be the name of a medium.
        return [{"path": key, **each} if kind_of(key) else each for key, each in values.items()]
    lists = {key: each for key, each in values.items() if isinstance(each, list) and each and isinstance(each[0], dict)}
    if is_row or not lists:
        return [values]
    if len(lists) == 1 and lists.keys() <= {*table_of(None).lists}:
        return next(iter(lists.values()))
    what = ", ".join(f"{name} ({len(each):,})" for name, each in lists.items())
    raise UserError(
        f"{where}: one JSON object, not an array or lines; its lists of records: {what}. Write one as JSONL"
    )


def parsed(record: Any) -> Row | list[Any] | BadSampleError:
    """Parse a record: a JSON object, or a list of them; an error for anything else."""
    if isinstance(record, bytes):
        try:
            record = json.loads(record)
        except (ValueError, RecursionError) as error:
            return BadSampleError(Reason.RECORD, f"no JSON: {error}")
    if isinstance(record, dict) or (isinstance(record, list) and record and all(isinstance(e, dict) for e in record)):
        return record
    return BadSampleError(Reason.RECORD, "no mapping")


def _records(shard: Shard, start: int) -> Iterator[tuple[int, Any]]:
    """Yield where records end, and their content, parsed or not, from an offset at which a record starts.

    ``UserError`` for an array whose elements are no JSON objects, and for a record that is too long.
    """
    where = f"source.path={shard.place}"
    with _opened(shard.place) as file:
        if start:
            file.seek(start)
        if _layout(shard.place, shard.version) == "array":
            yield from _elements(where, file, start)
            return
        while line := file.readline(MAX_RECORD_BYTES):
            start += len(line)
            if len(line) == MAX_RECORD_BYTES:
                raise UserError(f"{where}: the line that ends at byte {start} is longer than that")
            if line.removeprefix(_BOM).strip():
                yield start, line


def _elements(where: str, file: IO[bytes], text_start: int) -> Iterator[tuple[int, Any]]:
    decoder = json.JSONDecoder()
    # One character per byte, which leaves the structure of JSON unchanged.
    text = ""
    place = 0
    while True:
        gap = _GAP.match(text, place)
        start = gap.end() if gap else place
        try:
            if text[start] == "]":
                break
            if text[start] != "{":
                raise ValueError("neither an object nor the end")
            record, end = decoder.raw_decode(text, start)
        except (IndexError, ValueError, RecursionError) as error:
            more = file.read(max(_READ_BYTES, len(text)))
            if not more or len(text) - place > MAX_RECORD_BYTES:
                what = f"has no JSON object of up to {MAX_RECORD_BYTES} bytes at byte {text_start + place}"
                raise UserError(f"{where}: {what}") from error
            text_start += place
            text = text[place:] + more.decode("latin-1")
            place = 0
        else:
            yield text_start + end, record if text.isascii() else text[start:end].encode("latin-1")
            place = end
    if text[start + 1 :].strip() or file.read(_READ_BYTES).strip():
        raise UserError(f"{where}: has text after the array, at byte {text_start + start + 1}")
