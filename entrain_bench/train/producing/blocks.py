"""Memory that a producer shares with the ranks of a lane: which block is free, and the blocks themselves."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

# Sizes are multiples of it, so that a block fits most of what comes later.
GRAIN_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a value goes. ``dropped`` is a block that it takes the place of."""

    block: int
    size: int
    is_new: bool
    dropped: int | None = None


@dataclass(slots=True)
class Ledger:
    """Blocks that a producer has lent to the ranks of a lane; every rank receives every value.

    A rank may hold a value as long as it likes (a forward's input stays until its backward), so a block is used again
    only when all have let go of it. What waits to be taken is bounded: there are never more blocks than ``ahead`` and
    those that ranks held at the same time.
    """

    num_readers: int
    ahead: int
    _waiting: list[int] = field(init=False)
    _sizes: dict[int, int] = field(default_factory=dict)
    _holders: dict[int, int] = field(default_factory=dict)
    _num_made: int = 0

    def __post_init__(self) -> None:
        self._waiting = [0] * self.num_readers

    @property
    def num_waiting(self) -> int:
        """Values that the slowest rank has not taken."""
        return max(self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether one more value may wait."""
        return self.num_waiting < self.ahead

    def place(self, num_bytes: int) -> Placement:
        """Hand a value to all ranks: the least free block that holds it, or a new one for the least free one."""
        assert self.has_room
        assert num_bytes
        self._waiting = [waiting + 1 for waiting in self._waiting]
        free = sorted((size, block) for block, size in self._sizes.items() if not self._holders[block])
        fitting = [block for size, block in free if size >= num_bytes]
        dropped = None
        if not fitting:
            if free:
                dropped = free[0][1]
                del self._sizes[dropped], self._holders[dropped]
            fitting = [self._num_made]
            self._sizes[self._num_made] = -(-num_bytes // GRAIN_BYTES) * GRAIN_BYTES
            self._num_made += 1
        block = fitting[0]
        is_new = block not in self._holders
        self._holders[block] = self.num_readers
        return Placement(block, self._sizes[block], is_new, dropped)

    def take(self, reader: int) -> None:
        """A rank has taken the next value."""
        assert self._waiting[reader]
        self._waiting[reader] -= 1

    def release(self, block: int) -> None:
        """A rank holds a block no longer."""
        assert self._holders[block]
        self._holders[block] -= 1


class Block:
    """Shared memory without a name: it is gone when the last process that maps it is, however that one ends.

    Python's own shared memory has a name in ``/dev/shm``, which stays if all who know it are killed, and counts against
    the few MiB that containers often allow there.
    """

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        """New memory of ``size`` bytes, or that behind a descriptor, which is closed."""
        # Another process has it as long as one maps it; Python's mapping has a descriptor of its own.
        self.descriptor = os.memfd_create("entrain-bench") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, size)
        self._memory = mmap.mmap(self.descriptor, size)
        close = weakref.finalize(self, os.close, self.descriptor)
        if descriptor is not None:
            close()

    def tensor(self, let_go: Callable[[], object] | None = None) -> Tensor:
        """The memory as bytes ``[size]``; ``let_go`` is called once no tensor refers to it any more."""
        array = np.frombuffer(self._memory, np.uint8)
        if let_go is not None:
            # The tensor's memory keeps this very array. Not when Python ends: nobody is listening then.
            weakref.finalize(array, let_go).atexit = False
        return torch.from_numpy(array)
