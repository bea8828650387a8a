"""JSON and JSONL files in blocks of records: files of any size are read a piece at a time, by many processes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from entrain_bench.base.arrays import IntArray

from ..budget import BUDGET

# Records of a block, and the bytes after which a block ends earlier.
_BLOCK_RECORDS = 8192
_BLOCK_BYTES = 32 * 2**20
_READ_BYTES = 2**20
# A longer record is none: a byte of JSON takes up to 32 bytes as objects of Python's.
MAX_RECORD_BYTES = BUDGET.num_bytes // 32
_SPACE = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"
_STRUCTURE = re.compile(rb"\\[\s\S]|[\"\[\]{}]")


@dataclass(frozen=True, slots=True)
class Block:
    """Records that follow one another: the number of the first, and where their bytes start and stop."""

    first: int
    start: int
    stop: int


def is_array(path: Path) -> bool:
    """Whether a file is one JSON array, as LLaVA's; and else a record a line."""
    with path.open("rb") as file:
        head = file.read(4096).removeprefix(_BOM).lstrip(_SPACE)
    return head.startswith(b"[")


def blocks_of(path: Path) -> Iterator[Block]:
    """The blocks of a file; what cannot be divided into records is the last one."""
    with path.open("rb") as file:
        first = start = number = 0
        for number, end in enumerate(_ends(path, file), 1):
            if number - first >= _BLOCK_RECORDS or end - start >= _BLOCK_BYTES:
                yield Block(first, start, end)
                first = number
                start = end
        size = path.stat().st_size
        file.seek(start)
        # The end of an array, and empty lines, are no block.
        if number > first or (size - start > _READ_BYTES) or file.read().strip(_SPACE + b"]"):
            yield Block(first, start, size)


def record_ends(path: Path) -> IntArray:
    """Where the records of a file end, in bytes ``[records]``."""
    with path.open("rb") as file:
        return np.fromiter(_ends(path, file), np.int64)


def _ends(path: Path, file: IO[bytes]) -> Iterator[int]:
    return _array_ends(file) if is_array(path) else _line_ends(file)


def records_of(path: Path, block: Block) -> Iterator[Any]:
    """The records of a block; a ``ValueError`` in place of one that is none, and of all that follow it in an array."""
    with path.open("rb") as file:
        file.seek(block.start)
        if not is_array(path):
            yield from _lines(file, block.stop)
            return
        if block.stop - block.start > _BLOCK_BYTES + MAX_RECORD_BYTES:
            yield ValueError(f"no records that end, from byte {block.start} on")
            return
        text = file.read(block.stop - block.start).removeprefix(_BOM).decode(errors="replace")
    yield from _elements(text, block.start == 0)


def _elements(text: str, is_first: bool) -> Iterator[Any]:
    """The elements of a piece of an array, which begins with the array's bracket or with a comma."""
    decoder = json.JSONDecoder()
    place = 0
    opening = "[" if is_first else ","
    while True:
        while place < len(text) and (text[place].isspace() or text[place] == opening):
            opening = "," if text[place] == "[" else opening
            place += 1
        if place >= len(text) or text[place] == "]":
            return
        try:
            if text[place] not in "{[":
                raise ValueError("an element that is no mapping")
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            yield ValueError(f"no JSON: {error}")
            return
        yield value


def _lines(file: IO[bytes], stop: int) -> Iterator[Any]:
    while file.tell() < stop:
        line = file.readline(MAX_RECORD_BYTES)
        if not line.endswith(b"\n") and file.tell() < stop:
            yield ValueError(f"a line of more than {MAX_RECORD_BYTES} bytes")
            while not line.endswith(b"\n") and file.tell() < stop:
                line = file.readline(MAX_RECORD_BYTES)
            continue
        line = line.removeprefix(_BOM).strip()
        if not line:
            continue
        try:
            yield json.loads(line)
        except (ValueError, RecursionError) as error:
            yield ValueError(f"no JSON: {error}")


def _line_ends(file: IO[bytes]) -> Iterator[int]:
    """Where lines that are not empty end."""
    place = 0
    blank = True
    while piece := file.readline(_READ_BYTES):
        place += len(piece)
        blank = blank and not piece.strip()
        if piece.endswith(b"\n"):
            if not blank:
                yield place
            blank = True


def _array_ends(file: IO[bytes]) -> Iterator[int]:
    """Where the elements of an array end: quotes and brackets tell, without making values of them."""
    depth = 0
    in_text = False
    place = 0
    while piece := file.read(_READ_BYTES):
        # What a backslash stands before is not cut off from it.
        while piece.endswith(b"\\") and (more := file.read(1)):
            piece += more
        for found in _STRUCTURE.finditer(piece):
            mark = found[0]
            if mark == b'"':
                in_text = not in_text
            elif in_text or mark.startswith(b"\\"):
                continue
            elif mark in b"[{":
                depth += 1
            else:
                depth -= 1
                if depth == 1:
                    yield place + found.end()
                elif depth == 0:
                    return
        place += len(piece)
