"""A value in two parts: the bytes of its tensors, which go through shared memory, and the rest, which is pickled."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

# Any element type may begin there; a line of a cache.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Outline:
    """A value without the bytes of its tensors.

    Attributes:
        rest: the pickled rest, in which tensors are known by offset, type and shape.
        num_bytes: of all tensors, with gaps between them.
    """

    rest: bytes
    num_bytes: int

    def fill(self, memory: Tensor) -> Any:
        """The value with its tensors in the bytes of ``memory [>= num_bytes]``; only for what this suite pickled."""
        return _Unpickler(BytesIO(self.rest), memory).load()


def outline_of(value: object) -> tuple[Outline, list[tuple[int, Tensor]]]:
    """The outline of a value, and its tensors with the offsets of their bytes."""
    rest = BytesIO()
    pickler = _Pickler(rest)
    pickler.dump(value)
    return Outline(rest.getvalue(), pickler.num_bytes), pickler.tensors


def write_tensors(tensors: list[tuple[int, Tensor]], memory: Tensor) -> None:
    """Copy tensors to their offsets in the bytes of ``memory``."""
    for offset, tensor in tensors:
        _part(memory, offset, tensor.dtype, tuple(tensor.shape)).copy_(tensor)


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
