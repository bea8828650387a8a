"""One file that holds what thousands of record files say: a cache, which only saves the time of reading them.

``runs.index`` in a folder of results has a row a record file that proved itself (``sealed``), known by its name and the
SHA-256 of its bytes: size and time of change may be what they were though the file is not. Parts of configurations,
which many runs share, are stored once. Whoever writes the file replaces it whole; a reader hashes every record file and
parses it only if its hash is not that of the row. The file is a table in the Parquet format after its own SHA-256, so
what was damaged is not taken.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from entrain_bench.base.files import write_atomically
from entrain_bench.config.schema import GROUP_KEYS
from entrain_bench.records.sealed import unsealed

FILE = "runs.index"
# What is left of a configuration without its groups; and their columns.
PARTS = ("rest", *GROUP_KEYS)
SCHEMA = pa.schema(
    [
        *(("key", pa.string()), ("digest", pa.string()), ("record", pa.string())),
        *((name, pa.dictionary(pa.int32(), pa.string())) for name in PARTS),
    ]
)
HASH_BYTES = 32
# Different parts of configurations that are held once however many records have them.
MAX_PARTS = 4096


class Row(NamedTuple):
    """A record file: a hash of its bytes, what it says without the configuration, texts of ``PARTS``."""

    digest: str
    record: str
    parts: tuple[str | None, ...]

    @property
    def values(self) -> dict[str, Any]:
        """The content; parts of configurations that are equal are one object."""
        rest, *groups = self.parts
        config = dict(_shared(rest or "{}"))
        config |= {name: _shared(text) for name, text in zip(GROUP_KEYS, groups, strict=True) if text is not None}
        # As it is in the file.
        return {**json.loads(self.record), "config": dict(sorted(config.items()))}


@lru_cache(maxsize=MAX_PARTS)
def _shared(text: str) -> Any:
    return json.loads(text)


class Index:
    """The rows of a folder, by key.

    Args:
        root: the folder of results.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / FILE
        self._rows: dict[str, Row] = {}
        self._stored: Mapping[str, Row] = {}
        # Size and time of change of the files that this process has read: what it took from them was right.
        self._seen: dict[str, tuple[int, int]] = {}

    def load(self) -> None:
        """Read the file, unless that was done; one that is absent or damaged has no rows."""
        if self._stored:
            return
        with suppress(OSError, ValueError, KeyError):
            self._stored = dict(_rows_of(self._path.read_bytes()))
            self._rows = {**self._stored, **self._rows}

    def row(self, key: str, *paths: str) -> Row | None:
        """The row of a record file, which is parsed if it is not known as it is; None if there is no file.

        Args:
            key: of the record.
            *paths: where the file may be, the first that is there counts.

        Raises:
            OSError: for a file that cannot be read.
            ValueError, KeyError, AttributeError, TypeError: for a file that is no record of the key.
        """
        for path in paths:
            try:
                # A path object would take ten times as long, for every cell of a sweep.
                status = os.stat(path)  # noqa: PTH116
            except FileNotFoundError:
                continue
            seen = status.st_size, status.st_mtime_ns
            if self._seen.get(key) != seen:
                content = Path(path).read_bytes()
                known, digest = self._rows.get(key), hashlib.sha256(content).hexdigest()
                if known is None or known.digest != digest:
                    self._rows.pop(key, None)
                    self._rows[key] = _row_of(content, key, digest)
                self._seen[key] = seen
            return self._rows[key]
        return None

    def save(self, keys: Mapping[str, str]) -> None:
        """Write the rows of these keys, unless they are what the file has; where it cannot be, time is lost alone."""
        rows = {key: self._rows[key] for key in keys if key in self._rows}
        if rows != self._stored:
            with suppress(OSError):
                write_atomically(self._path, _file_of(rows))
                self._stored = rows


def record_files(folder: Path) -> dict[str, str]:
    """Paths of all record files in a folder and those right below, by key, sorted."""
    return dict(sorted(_record_files(str(folder), below=True)))


def _record_files(folder: str, below: bool) -> Iterator[tuple[str, str]]:
    try:
        entries = [*os.scandir(folder)]
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.name.endswith(".json"):
            yield entry.name.removesuffix(".json"), entry.path
        elif below and entry.is_dir():
            yield from _record_files(entry.path, below=False)


def _row_of(content: bytes, key: str, digest: str) -> Row:
    values = unsealed(content, key)
    config = dict(values.pop("config"))
    groups = [json.dumps(config.pop(name)) if name in config else None for name in GROUP_KEYS]
    return Row(digest, json.dumps(values), (json.dumps(config), *groups))


def _file_of(rows: Mapping[str, Row]) -> bytes:
    columns: list[list[Any]] = [
        [*rows],
        [row.digest for row in rows.values()],
        [row.record for row in rows.values()],
        *([row.parts[place] for row in rows.values()] for place in range(len(PARTS))),
    ]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    file = BytesIO()
    table = pa.Table.from_arrays(arrays, schema=SCHEMA)
    pq.write_table(table, file, compression="zstd", use_dictionary=[*PARTS])
    return hashlib.sha256(file.getvalue()).digest() + file.getvalue()


def _rows_of(content: bytes) -> Iterator[tuple[str, Row]]:
    written, stored = content[HASH_BYTES:], content[:HASH_BYTES]
    if hashlib.sha256(written).digest() != stored:
        raise ValueError
    table = pq.read_table(BytesIO(written), schema=SCHEMA)
    columns = [_values(table[name].combine_chunks()) for name in SCHEMA.names]
    for key, digest, record, *parts in zip(*columns, strict=True):
        yield key, Row(digest, record, tuple(parts))


def _values(column: Any) -> list[Any]:
    """The values of a column; those of a dictionary are one object each."""
    if not isinstance(column, pa.DictionaryArray):
        return list(column.to_pylist())
    values = column.dictionary.to_pylist()
    return [None if place is None else values[place] for place in column.indices.to_pylist()]
