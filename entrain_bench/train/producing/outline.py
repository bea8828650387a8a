"""A value as bytes: those of its tensors, to be used where they lie, and behind them the rest, which is pickled."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Any element type may begin there; a line of a cache.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Outline:
    """Where in its memory the rest of a value is: all that must be known to read it.

    Attributes:
        begin: of the pickled rest, in which tensors are known by offset, type and shape, bytes.
        end: of it and of the value, bytes.
    """

    begin: int
    end: int

    def fill(self, memory: Tensor) -> Any:
        """The value with its tensors in the bytes of ``memory [>= end]``; only for what this suite pickled."""
        return _Unpickler(BytesIO(memory.numpy()[self.begin : self.end].tobytes()), memory).load()


@dataclass(frozen=True, slots=True)
class Parts:
    """A value to be written."""

    tensors: list[tuple[int, Tensor]]
    rest: bytes
    outline: Outline

    def write(self, memory: Tensor) -> None:
        """Copy tensors and rest to the bytes of ``memory [>= outline.end]``."""
        for offset, tensor in self.tensors:
            _part(memory, offset, tensor.dtype, tuple(tensor.shape)).copy_(tensor)
        memory.numpy()[self.outline.begin : self.outline.end] = np.frombuffer(self.rest, np.uint8)


def parts_of(value: object) -> Parts:
    """The parts of a value."""
    file = BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    rest, begin = file.getvalue(), pickler.num_bytes
    return Parts(pickler.tensors, rest, Outline(begin, begin + len(rest)))


class _Pickler(pickle.Pickler):
    def __init__(self, file: BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[tuple[int, Tensor]] = []
        self.num_bytes = 0

    def persistent_id(self, value: object) -> object:
        if not isinstance(value, Tensor):
            return None
        offset = -(-self.num_bytes // ALIGNMENT) * ALIGNMENT
        self.tensors.append((offset, value.detach()))
        self.num_bytes = offset + value.numel() * value.element_size()
        return offset, value.dtype, tuple(value.shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BytesIO, memory: Tensor) -> None:
        super().__init__(file)
        self.memory = memory

    def persistent_load(self, place: Any) -> Tensor:
        return _part(self.memory, *place)


def _part(memory: Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return memory[offset : offset + num_bytes].view(dtype).view(shape)
