"""Times of a rank's actions, by CUDA events or the host's clock; clocks of ranks compared; traces on request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import profile

from entrain_bench.base.arrays import FloatArray

# The round trip of least delay counts; a loaded host may delay some.
ROUND_TRIPS = 4
# The iteration that is profiled: the first after the one that warms up.
PROFILED_ITERATION = 1
# An event of CUDA, or seconds of the host.
Mark = Any


@dataclass(slots=True)
class Clock:
    """Start and end of a rank's actions in seconds from a common moment, ``began_s`` on rank 0's clock."""

    device: torch.device
    timer: Callable[[], float] = perf_counter
    began_s: float = 0.0
    _ran: list[tuple[int, Mark, Mark]] = field(default_factory=list)
    _zero: Mark = 0.0

    def start_together(self, control: dist.ProcessGroup) -> None:
        """Take as zero a moment at which no rank's device has anything to do; collective over all ranks."""
        offset = clock_offset(control, self.timer)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier(group=control)
        self.began_s = self.timer() + offset
        self.start()

    def start(self) -> None:
        """Take this moment as zero."""
        self._ran.clear()
        self._zero = self._mark()

    @contextmanager
    def action(self, action: int) -> Iterator[None]:
        """Time what runs inside as one action."""
        start = self._mark()
        yield
        self._ran.append((action, start, self._mark()))

    def rows(self) -> FloatArray:
        """Action, start and end of everything that ran ``[actions, 3]``; waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        rows = [(action, self._seconds(start), self._seconds(end)) for action, start, end in self._ran]
        return np.array(rows, dtype=np.float64).reshape(-1, 3)

    def seconds(self) -> FloatArray:
        """Seconds of everything that ran ``[actions]``; waits for the device."""
        rows = self.rows()
        return np.asarray(rows[:, 2] - rows[:, 1])

    def _mark(self) -> Mark:
        if self.device.type != "cuda":
            return self.timer()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, mark: Mark) -> float:
        return mark - self._zero if self.device.type != "cuda" else float(self._zero.elapsed_time(mark)) / 1e3


def clock_offset(control: dist.ProcessGroup, timer: Callable[[], float]) -> float:
    """Seconds to add to this rank's clock for rank 0's, as NTP does (RFC 5905, section 8); collective."""
    told = torch.zeros(1, dtype=torch.float64)
    if control.rank() == 0:
        for rank in range(1, control.size()):
            for _ in range(ROUND_TRIPS):
                dist.recv(told, rank, group=control)
                dist.send(told.fill_(timer()), rank, group=control)
        return 0.0
    trips = []
    for _ in range(ROUND_TRIPS):
        asked = timer()
        dist.send(told, 0, group=control)
        dist.recv(told, 0, group=control)
        answered = timer()
        trips.append((answered - asked, float(told) - (asked + answered) / 2))
    return min(trips)[1]


def on_one_clock(rows: Sequence[FloatArray], began_s: Sequence[float]) -> list[FloatArray]:
    """Action, start and end by rank ``[ranks][actions, 3]``, in seconds since the first rank began (``began_s``)."""
    first = min(began_s)
    return [own + np.array([0.0, s - first, s - first]) for own, s in zip(rows, began_s, strict=True)]


@contextmanager
def profiler(folder: str | None, iteration: int) -> Iterator[None]:
    """Trace one iteration of each rank into ``<folder>/rank<r>.json``; does nothing in others or without a folder."""
    if folder is None or iteration != PROFILED_ITERATION:
        yield
        return
    with profile() as trace:
        yield
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(str(path / f"rank{dist.get_rank()}.json"))
