"""Values as bytes, read without running code: JSON, and the arrays that it names as they lie in memory.

Rank 0's program travels so: assigners may be limited by wall time, so ranks that each computed one could disagree, and
hang.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrain_bench.program import Program
from entrain_bench.program.assignment import Chunks
from entrain_bench.program.layout import Layout
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes

# Any element type may begin there; a line of a cache.
ALIGNMENT = 64
_GIVEN = ("model", "layout", "shapes", "chunks", "remade")

type Memory = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Parts:
    """A value to be written: where its JSON begins and ends, behind the arrays, whose places are known."""

    ends: NDArray[np.int64]
    text: bytes
    arrays: list[tuple[int, NDArray[Any]]]

    @property
    def size(self) -> int:
        """Bytes of the whole value."""
        return int(self.ends[1])

    def write(self, memory: Memory) -> None:
        """Copy the value to the first ``size`` of ``memory [>= size]``."""
        for offset, array in ((0, self.ends), *self.arrays):
            _view(memory, offset, array.dtype, array.shape)[...] = array
        memory[slice(*self.ends)] = np.frombuffer(self.text, np.uint8)


def parts_of(value: Any) -> Parts:
    """The parts of a value: numbers, text, lists and mappings, arrays and CPU tensors; tuples come back as lists."""
    ends = np.zeros(2, np.int64)
    arrays = list[tuple[int, NDArray[Any]]]()

    def place(array: Any) -> dict[str, Any]:
        array = np.asarray(array)
        assert array.dtype.kind in "biuf", f"{type(array)} is no array of numbers"
        offset = -(-int(ends[0] or ALIGNMENT) // ALIGNMENT) * ALIGNMENT
        arrays.append((offset, array))
        ends[0] = offset + array.nbytes
        return {"array at": offset, "dtype": array.dtype.str, "shape": array.shape}

    text = json.dumps(value, default=place).encode()
    ends[0] = max(ends[0], ALIGNMENT)
    ends[1] = ends[0] + len(text)
    return Parts(ends, text, arrays)


def value_in(memory: Memory) -> Any:
    """The value that was written there; its arrays are views of ``memory``."""

    def array(found: dict[str, Any]) -> Any:
        if "array at" not in found:
            return found
        return _view(memory, found["array at"], np.dtype(found["dtype"]), found["shape"])

    begin, end = _view(memory, 0, np.dtype(np.int64), (2,))
    return json.loads(memory[begin:end].tobytes(), object_hook=array)


def to_bytes(value: Any) -> bytes:
    """The value as ``from_bytes`` reads it."""
    parts = parts_of(value)
    memory = np.zeros(parts.size, np.uint8)
    parts.write(memory)
    return memory.tobytes()


def from_bytes(content: bytes) -> Any:
    """The value that ``to_bytes`` wrote."""
    return value_in(np.frombuffer(bytearray(content), np.uint8))


def program_to_bytes(program: Program) -> bytes:
    """The arrays of a program; model, layout and shapes are known to every rank."""
    columns = {f.name: getattr(program, f.name) for f in fields(Program) if f.name not in _GIVEN}
    chunks = [{f.name: getattr(own, f.name) for f in fields(Chunks)} for own in program.chunks]
    return to_bytes({"columns": columns, "chunks": chunks, "remade": program.remade})


def program_from_bytes(content: bytes, model: ModelSpec, layout: Layout, shapes: SampleShapes) -> Program:
    """The program that ``program_to_bytes`` wrote."""
    values = from_bytes(content)
    chunks = tuple(Chunks(**own) for own in values["chunks"])
    return Program(model, layout, shapes, chunks=chunks, remade=tuple(values["remade"]), **values["columns"])


def _view(memory: Memory, offset: int, dtype: np.dtype[Any], shape: Any) -> NDArray[Any]:
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return memory[offset : offset + num_bytes].view(dtype).reshape(shape)
