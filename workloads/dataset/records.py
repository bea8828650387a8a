"""Annotation files next to media: LLaVA's JSON arrays, and JSONL manifests.

Hugging Face's reader gives a column one type and reads an array whole; these files mix types and may be large.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np

from entrain_bench.base.arrays import IntArray
from entrain_bench.base.errors import UserError

from ..budget import BUDGET
from .fields import Fields, FileSource, Row
from .files import DataFile
from .interface import BadSampleError, Limits, Reason, Shard

_SHARD_RECORDS = 8192
# Fields are found by so many records of each of the first files.
_HEAD_RECORDS = 1000
_HEAD_FILES = 8
_READ_BYTES = 2**20
# The longest record: a byte of JSON takes up to 32 bytes as Python objects.
MAX_RECORD_BYTES = BUDGET.num_bytes // 32
_BOM = b"\xef\xbb\xbf"
_OPENING = re.compile("(?:\xef\xbb\xbf)?\\s*\\[\\s*")
_COMMA = re.compile("[\\s,]*")


@dataclass(frozen=True, kw_only=True)
class RecordSource(FileSource):
    """Records of JSON arrays, or of files with one record per line.

    Attributes:
        root: folder of the media that records name; empty: the folder of the annotation file.
        id: field that names a record in messages.
    """

    ENDINGS: ClassVar[Sequence[str]] = (".json", ".jsonl")
    SPARSE: ClassVar[bool] = True

    root: str = ""
    id: str | None = None

    def fields_at(self, place: str = "") -> Fields:
        """Return the fields of a file's records."""
        return replace(super().fields_at(), root=self.root or str(Path(place).parent))

    def shards(self) -> list[Shard]:
        """Return blocks of records; ``UserError`` for no files, an array that is no JSON, and a record too long."""
        shards = []
        for file in self.files():
            ends = _record_ends(file)
            for first in range(0, len(ends) - 1, _SHARD_RECORDS):
                last = min(first + _SHARD_RECORDS, len(ends) - 1)
                part = (int(ends[first]), int(ends[last]))
                shards.append(Shard(file.label, first, file.version, str(file.path), part))
        return shards

    def head(self) -> tuple[list[str], list[Row]]:
        """Return the names of the fields of the first records of the first files, and these records."""
        found: list[Row] = []
        for file in self.files()[:_HEAD_FILES]:
            records = _records(file.path, 0, file.path.stat().st_size)
            found += [record for record in islice(records, _HEAD_RECORDS) if isinstance(record, Mapping)]
        return list(dict.fromkeys(str(name) for record in found for name in record)), found

    def rows(self, shard: Shard, limits: Limits) -> Iterator[tuple[str, Row | BadSampleError]]:  # noqa: ARG002
        """Read the records of a block."""
        for number, record in enumerate(_records(Path(shard.place), *shard.part), shard.first):
            yield self._row(number, record)

    def row(
        self,
        file: DataFile,
        number: int,
        names: Sequence[str],  # noqa: ARG002
        limits: Limits,  # noqa: ARG002
    ) -> tuple[str, Row | BadSampleError]:
        """Read one record only."""
        ends = _record_ends(file)
        if not 0 <= number < len(ends) - 1:
            raise BadSampleError(Reason.FILE, f"{file.path.name} has no record {number + 1}")
        return self._row(number, next(_records(file.path, int(ends[number]), int(ends[number + 1]))))

    def _row(self, number: int, record: Any) -> tuple[str, Row | BadSampleError]:
        key = f"record {number + 1}"
        if isinstance(record, BadSampleError):
            return key, record
        if not isinstance(record, Mapping):
            return key, BadSampleError(Reason.RECORD, "no mapping")
        return f"{key} ({record[self.id]})" if self.id and self.id in record else key, record


@lru_cache(maxsize=1024)
def _record_ends(file: DataFile) -> IntArray:
    """Return where the records of a file end, in bytes, after a zero ``[1 + records]``."""
    return np.array([0, *(end for end, _ in _split(file.path, 0))], np.int64)


def _records(path: Path, start: int, stop: int) -> Iterator[Any]:
    """Yield the records between two offsets; ``BadSampleError`` in place of a line that is no JSON."""
    for end, content in _split(path, start):
        try:
            yield json.loads(content)
        except (ValueError, RecursionError) as error:
            yield BadSampleError(Reason.RECORD, f"no JSON: {error}")
        if end >= stop:
            return


def _split(path: Path, start: int) -> Iterator[tuple[int, bytes]]:
    """Yield where records end and their content, from an offset at which a record starts.

    Raises:
        UserError: for an array whose elements are no JSON objects, and for a record that is too long.
    """
    with path.open("rb") as file:
        is_array = file.read(4096).removeprefix(_BOM).lstrip().startswith(b"[")
        file.seek(start)
        yield from (_split_array if is_array else _split_lines)(path, file)


def _split_lines(path: Path, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    while line := file.readline(MAX_RECORD_BYTES):
        if len(line) == MAX_RECORD_BYTES:
            raise UserError(f"source.path={path}: the line that ends at byte {file.tell()} is longer than that")
        if line.removeprefix(_BOM).strip():
            yield file.tell(), line


def _split_array(path: Path, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    decoder = json.JSONDecoder()
    # One character per byte, which leaves the structure of JSON as it is.
    text = ""
    text_start = file.tell()
    gap = _OPENING if text_start == 0 else _COMMA
    place = 0
    while True:
        found = gap.match(text, place)
        try:
            if found is None or text[found.end()] not in "{]":
                raise ValueError("neither an object nor the end")
            if text[found.end()] == "]":
                break
            _, end = decoder.raw_decode(text, found.end())
        except (IndexError, ValueError, RecursionError) as error:
            more = file.read(max(_READ_BYTES, len(text)))
            if not more or len(text) - place > MAX_RECORD_BYTES:
                what = f"has no JSON object of up to {MAX_RECORD_BYTES} bytes at byte {text_start + place}"
                raise UserError(f"source.path={path}: {what}") from error
            text_start += place
            text = text[place:] + more.decode("latin-1")
            place = 0
        else:
            yield text_start + end, text[found.end() : end].encode("latin-1")
            gap = _COMMA
            place = end
    if text[found.end() + 1 :].strip() or file.read(_READ_BYTES).strip():
        raise UserError(f"source.path={path}: has text after the array, at byte {text_start + found.end() + 1}")
