"""When each action of a rank ran: CUDA events on a GPU, a clock of the host elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from entrain_bench.base.arrays import FloatArray
from entrain_bench.train.measuring.alignment import clock_offset

# An event of CUDA, or seconds of the host.
Mark = Any


@dataclass(slots=True)
class Clock:
    """Start and end of a rank's actions in one iteration, in seconds from a moment common to all ranks.

    ``timer`` is for actions on the CPU; ``began_s`` is when ``start_together`` returned, on the clock of rank 0's host.
    """

    device: torch.device
    timer: Callable[[], float] = perf_counter
    began_s: float = 0.0
    _ran: list[tuple[int, Mark, Mark]] = field(default_factory=list)
    _zero: Mark = 0.0

    def start_together(self, control: dist.ProcessGroup) -> None:
        """Take as zero a moment at which no rank's device has anything to do; collective over all ranks.

        Ranks leave a barrier one after the other; ``began_s`` tells by how much.
        """
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

    def _mark(self) -> Mark:
        if self.device.type != "cuda":
            return self.timer()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, mark: Mark) -> float:
        return mark - self._zero if self.device.type != "cuda" else float(self._zero.elapsed_time(mark)) / 1e3
