"""Inputs of a rank's next forwards, made in a thread while the present ones run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock

import torch

from entrain_bench.train.running.data import Inputs

# Forwards whose inputs wait; the features of 5,000 tokens of 1,176 numbers take 24 MB.
LOAD_AHEAD = 4


class Loader:
    """Makes inputs one after the other in one thread, a bounded number ahead of who takes them."""

    def __init__(self, device: torch.device, ahead: int = LOAD_AHEAD) -> None:
        # A thread computes on the first GPU until it chooses; pinning memory would leave a context there.
        choose = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        self._pool = ThreadPoolExecutor(1, "load", choose)
        self._ahead, self._lock = ahead, Lock()
        self._waiting: deque[Callable[[], Inputs]] = deque()
        self._begun: deque[Future[Inputs]] = deque()

    def load(self, makers: Sequence[Callable[[], Inputs]]) -> Iterator[Inputs]:
        """What the makers return, in order; they begin once those of earlier calls leave room.

        The inputs of earlier calls must be taken first.
        """
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
