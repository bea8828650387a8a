"""Inputs of a rank's next forwards: made when they are needed, or before that, by a thread or by other processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Protocol

import torch

from entrain_bench.train.producing.producer import LOAD_AHEAD
from entrain_bench.train.producing.reader import Reader
from entrain_bench.train.running.data import Inputs

type MakeInputs = Callable[[], Inputs]


class Loader(Protocol):
    """Where inputs come from.

    Attributes:
        pins: whether makers should leave features in memory that a GPU can copy from by itself.
    """

    pins: bool

    def load(self, makers: Sequence[MakeInputs]) -> Iterator[Inputs]:
        """What the makers return, in order. The inputs of earlier calls must be taken first."""
        ...


class InlineLoader:
    """Makes inputs when they are taken."""

    def __init__(self, device: torch.device) -> None:
        self.pins = device.type == "cuda"

    def load(self, makers: Sequence[MakeInputs]) -> Iterator[Inputs]:
        """What the makers return."""
        return (maker() for maker in makers)


class ThreadLoader:
    """Makes inputs one after the other in one thread, a bounded number ahead of who takes them."""

    def __init__(self, device: torch.device, ahead: int = LOAD_AHEAD) -> None:
        self.pins = device.type == "cuda"
        # A thread computes on the first GPU until it chooses; pinning memory would leave a context there.
        choose = partial(torch.cuda.set_device, device) if self.pins else None
        self._pool = ThreadPoolExecutor(1, "load", choose)
        self._ahead, self._lock = ahead, Lock()
        self._waiting: deque[MakeInputs] = deque()
        self._begun: deque[Future[Inputs]] = deque()

    def load(self, makers: Sequence[MakeInputs]) -> Iterator[Inputs]:
        """What the makers return; they begin once those of earlier calls leave room."""
        with self._lock:
            self._waiting.extend(makers)
            self._begin()
        return (self._take() for _ in range(len(makers)))

    def _take(self) -> Inputs:
        with self._lock:
            future = self._begun.popleft()
            self._begin()
        return future.result()

    def _begin(self) -> None:
        while self._waiting and len(self._begun) < self._ahead:
            self._begun.append(self._pool.submit(self._waiting.popleft()))


class ProducerLoader:
    """Has producers make inputs; where ranks compute on a GPU, a thread copies them to pinned memory.

    A block is used again once nothing refers to it; copies to a GPU out of the block itself would still be under way.
    """

    pins = False

    def __init__(self, reader: Reader, device: torch.device) -> None:
        self._reader = reader
        self._pinning = ThreadLoader(device) if device.type == "cuda" else None

    def load(self, makers: Sequence[MakeInputs]) -> Iterator[Inputs]:
        """What the makers return."""
        taken: Iterator[Inputs] = self._reader.load(makers)
        if self._pinning is None:
            return taken
        return self._pinning.load([partial(_take_pinned, taken)] * len(makers))


def _take_pinned(taken: Iterator[Inputs]) -> Inputs:
    inputs = next(taken)
    return inputs if inputs.features is None else replace(inputs, features=inputs.features.pin_memory())
