"""Inputs of a rank's next forwards: made when they are needed, or ahead of that by a thread or by worker processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from queue import Queue, SimpleQueue
from threading import Thread
from typing import Any
from weakref import finalize

import torch
from torch import multiprocessing
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from entrain_bench.run.parallel import end_with_parent
from entrain_bench.train.messages.control import Failure
from entrain_bench.train.running.data import Content, Inputs, SampleData
from entrain_bench.train.settings import TrainSettings

# Inputs of forwards that wait for their rank, of which the features of 5,000 tokens of 1,176 numbers take 24 MB.
LOAD_AHEAD = 4
# Worker processes of a rank, if there are as many free cores.
WORKERS_PER_RANK = 2

# Arguments of ``SampleData.inputs`` for one chunk.
type Request = tuple[Any, ...]


class InlineLoader:
    """Makes inputs when they are taken; ``pins``: in memory that a GPU can copy from by itself."""

    def __init__(self, device: torch.device) -> None:
        self.pins = device.type == "cuda"

    def load(self, data: SampleData, requests: Sequence[Request]) -> Iterator[Inputs]:
        """Yield the inputs of chunks in order."""
        return (data.inputs(*request) for request in requests)


class ThreadLoader:
    """Makes inputs in one thread, at most ``ahead`` of the consumer."""

    def __init__(self, device: torch.device, ahead: int = LOAD_AHEAD) -> None:
        self.pins = device.type == "cuda"
        self._asked = SimpleQueue[Callable[[], Inputs] | None]()
        # One more is in the thread's hands.
        self._made = Queue[Inputs | Exception](max(1, ahead - 1))
        Thread(target=_make, args=(self._asked, self._made, device), name="load", daemon=True).start()
        finalize(self, self._asked.put, None)

    def load(self, data: SampleData, requests: Sequence[Request]) -> Iterator[Inputs]:
        """Yield the inputs of chunks in order; they are made as soon as earlier calls leave room."""
        for request in requests:
            self._asked.put(partial(data.inputs, *request))
        return (self._take() for _ in requests)

    def _take(self) -> Inputs:
        made = self._made.get()
        if isinstance(made, Exception):
            raise made
        return made


def _make(asked: SimpleQueue[Any], made: Queue[Inputs | Exception], device: torch.device) -> None:
    # A thread computes on the first GPU until it chooses; pinning memory would leave a context there.
    if device.type == "cuda":
        torch.cuda.set_device(device)
    while (make := asked.get()) is not None:
        try:
            made.put(make())
        except Exception as error:
            made.put(error)


class _Requests(IterableDataset[Inputs | Failure]):
    """Inputs that the workers of a ``DataLoader`` make; each takes requests from its own queue."""

    def __init__(self, content: Content, num_workers: int) -> None:
        context = multiprocessing.get_context("fork")
        self.queues = [context.Queue() for _ in range(num_workers)]
        self._content = content

    def __iter__(self) -> Iterator[Inputs | Failure]:
        worker = get_worker_info()
        assert worker is not None
        while (asked := self.queues[worker.id].get()) is not None:
            shapes, request = asked
            made: Inputs | Failure
            try:
                made = SampleData(shapes, self._content).inputs(*request)
            except Exception as error:
                made = Failure.of(error, f"worker {worker.id}")
            yield made


class WorkerLoader:
    """Has the workers of torch's ``DataLoader`` make inputs, in turn; where ranks compute on a GPU, it pins them."""

    pins = False

    def __init__(self, device: torch.device, content: Content, num_workers: int, timeout_s: float) -> None:
        requests = _Requests(content, num_workers)
        # Forked: workers hold nothing but what their rank has loaded, and compute on no device.
        loader = DataLoader(
            requests,
            batch_size=None,
            num_workers=num_workers,
            prefetch_factor=max(1, LOAD_AHEAD // num_workers),
            pin_memory=device.type == "cuda",
            timeout=timeout_s,
            worker_init_fn=_begin_worker,
            multiprocessing_context="fork",
        )
        self._made: Iterator[Any] = iter(loader)
        # As torch asks its workers.
        self._queues = cycle(requests.queues)
        # A worker that waits for a request would keep torch waiting for its end.
        finalize(self, _end_workers, requests.queues)

    def load(self, data: SampleData, requests: Sequence[Request]) -> Iterator[Inputs]:
        """Yield the inputs of chunks in order; raise what making them raised."""
        for request in requests:
            next(self._queues).put((data.shapes, request))
        return (self._take() for _ in requests)

    def _take(self) -> Inputs:
        made = next(self._made)
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
