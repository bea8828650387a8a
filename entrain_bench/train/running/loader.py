"""Inputs of a rank's next forwards: made when they are needed, or ahead of that by a thread or by worker processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from queue import Queue, SimpleQueue
from threading import Thread
from typing import Any
from weakref import finalize

import torch
from torch import multiprocessing
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from entrain_bench.base.arrays import IntArray
from entrain_bench.run.parallel import end_with_parent
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.train.messages.failure import Failure
from entrain_bench.train.running.content import Content
from entrain_bench.train.running.data import Inputs, SampleData
from entrain_bench.train.settings import TrainSettings

# Inputs of forwards that wait for their rank, of which the features of 5,000 tokens of 1,176 numbers take 24 MB.
LOAD_AHEAD = 4
# Worker processes of a rank, if there are as many free cores.
WORKERS_PER_RANK = 2


@dataclass(frozen=True, slots=True)
class MakeInputs:
    """Makes the inputs of a chunk; arguments of ``SampleData.inputs``."""

    data: SampleData
    module: ModuleSpec
    stage: int
    members: IntArray
    remade: int = 0
    splits_backward: bool = False

    def __call__(self) -> Inputs:
        """Return the inputs."""
        return self.data.inputs(
            self.module, self.stage, self.members, self.remade, splits_backward=self.splits_backward
        )


class InlineLoader:
    """Makes inputs when they are taken; ``pins``: in memory that a GPU can copy from by itself."""

    def __init__(self, device: torch.device) -> None:
        self.pins = device.type == "cuda"

    def load(self, makers: Sequence[MakeInputs]) -> Iterator[Inputs]:
        """Yield the inputs that the makers return, in order."""
        return (maker() for maker in makers)


class ThreadLoader:
    """Makes inputs one after the other in one thread, a bounded number ahead of who takes them."""

    def __init__(self, device: torch.device, ahead: int = LOAD_AHEAD) -> None:
        self.pins = device.type == "cuda"
        self._asked = SimpleQueue[Callable[[], Inputs] | None]()
        # One more is in the thread's hands.
        self._made = Queue[Inputs | Exception](max(1, ahead - 1))
        Thread(target=_make, args=(self._asked, self._made, device), name="load", daemon=True).start()
        finalize(self, self._asked.put, None)

    def load(self, makers: Sequence[Callable[[], Inputs]]) -> Iterator[Inputs]:
        """Yield the inputs that the makers return, in order; makers begin as soon as earlier calls leave room."""
        for maker in makers:
            self._asked.put(maker)
        return (self._take() for _ in makers)

    def _take(self) -> Inputs:
        made = self._made.get()
        if isinstance(made, Exception):
            raise made
        return made


def _make(asked: SimpleQueue[Any], made: Queue[Inputs | Exception], device: torch.device) -> None:
    """Make what is asked for until it is None."""
    # A thread computes on the first GPU until it chooses; pinning memory would leave a context there.
    if device.type == "cuda":
        torch.cuda.set_device(device)
    while (maker := asked.get()) is not None:
        try:
            made.put(maker())
        except Exception as error:
            made.put(error)


class _Requests(IterableDataset[tuple[int, Inputs | Failure]]):
    """Inputs that one worker of a ``DataLoader`` makes: it is asked for every ``len(queues)``-th of them."""

    def __init__(self, content: Content, num_workers: int) -> None:
        context = multiprocessing.get_context("fork")
        self.queues = [context.Queue() for _ in range(num_workers)]
        self._content = content

    def __iter__(self) -> Iterator[tuple[int, Inputs | Failure]]:
        worker = get_worker_info()
        assert worker is not None
        while (asked := self.queues[worker.id].get()) is not None:
            number, shapes, request = asked
            made: Inputs | Failure
            try:
                made = MakeInputs(SampleData(shapes, self._content), *request)()
            except Exception as error:
                made = Failure.of(error, f"worker {worker.id}")
            yield number, made


class WorkerLoader:
    """Has the workers of torch's ``DataLoader`` make inputs, in turn; where ranks compute on a GPU, it pins them."""

    pins = False

    def __init__(self, device: torch.device, content: Content, num_workers: int, timeout_s: float) -> None:
        self._requests = _Requests(content, num_workers)
        self._numbers = count()
        # Forked: workers hold nothing but what their rank has loaded, and compute on no device.
        loader = DataLoader(
            self._requests,
            batch_size=None,
            num_workers=num_workers,
            prefetch_factor=max(1, LOAD_AHEAD // num_workers),
            pin_memory=device.type == "cuda",
            timeout=timeout_s,
            worker_init_fn=_begin_worker,
            multiprocessing_context="fork",
        )
        self._made: Iterator[tuple[int, Any]] = iter(loader)
        # A worker that waits for a request would keep torch waiting for its end.
        finalize(self, _end_workers, self._requests.queues)

    def load(self, makers: Sequence[MakeInputs]) -> Iterator[Inputs]:
        """Yield the inputs that the makers return, in order; raise what making them raised."""
        numbers = [next(self._numbers) for _ in makers]
        for number, maker in zip(numbers, makers, strict=True):
            request = (maker.module, maker.stage, maker.members, maker.remade, maker.splits_backward)
            queue = self._requests.queues[number % len(self._requests.queues)]
            queue.put((number, maker.data.shapes, request))
        return (self._take(number) for number in numbers)

    def _take(self, number: int) -> Inputs:
        came, made = next(self._made)
        assert came == number, "inputs came in another order"
        if isinstance(made, Failure):
            raise made.as_error()
        assert isinstance(made, Inputs)
        return made


# Where inputs come from, in order; those of earlier calls of ``load`` must be taken first.
type Loader = InlineLoader | ThreadLoader | WorkerLoader


def make_loader(settings: TrainSettings, device: torch.device, content: Content) -> Loader:
    """Return the loader that ``harness.preprocessing`` names."""
    if settings.preprocessing == "inline":
        return InlineLoader(device)
    if settings.preprocessing == "thread":
        return ThreadLoader(device)
    return WorkerLoader(device, content, num_workers(settings), settings.timeout_s)


def num_workers(settings: TrainSettings) -> int:
    """Return the worker processes of a rank of this machine: as given, or as many as cores are free, one at least."""
    if settings.preprocessing_processes is not None:
        return settings.preprocessing_processes
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", settings.num_ranks))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores // ranks - 1, WORKERS_PER_RANK))


def _begin_worker(_: int) -> None:
    end_with_parent()


def _end_workers(queues: Sequence[Any]) -> None:
    for queue in queues:
        queue.put(None)
