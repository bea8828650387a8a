"""When each action of a rank ran: CUDA events on a GPU, a clock of the host elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist

from entrain_bench.base.arrays import FloatArray
from entrain_bench.train.measuring.alignment import clock_offset


@dataclass(slots=True)
class Clock:
    """Start and end of a rank's actions in one iteration, in seconds from a moment common to all ranks.

    Attributes:
        device: where the actions run.
        timer: of the host, for actions on the CPU.
        began_s: when it was started together with the other ranks', on the clock of rank 0's host.
    """

    device: torch.device
    timer: Callable[[], float] = perf_counter
    began_s: float = 0.0
    _actions: list[int] = field(default_factory=list)
    _marks: list[float | torch.cuda.Event] = field(default_factory=list)
    _zero: float | torch.cuda.Event = 0.0

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
        self._actions.clear()
        self._marks.clear()
        self._zero = self._mark()

    @contextmanager
    def action(self, action: int) -> Iterator[None]:
        """Time what runs inside as one action."""
        self._actions.append(action)
        self._marks.append(self._mark())
        yield
        self._marks.append(self._mark())

    def rows(self) -> FloatArray:
        """Action, start and end of everything that ran ``[actions, 3]``; waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        times = np.array([self._seconds(mark) for mark in self._marks]).reshape(-1, 2)
        return np.column_stack([self._actions, times]) if self._actions else np.zeros((0, 3))

    def _mark(self) -> float | torch.cuda.Event:
        if self.device.type != "cuda":
            return self.timer()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, mark: float | torch.cuda.Event) -> float:
        if isinstance(mark, torch.cuda.Event):
            assert isinstance(self._zero, torch.cuda.Event)
            return float(self._zero.elapsed_time(mark)) / 1e3
        assert not isinstance(self._zero, torch.cuda.Event)
        return mark - self._zero
