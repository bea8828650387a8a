"""Clocks of ranks brought to that of rank 0: machines count from different moments, and drift."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from entrain_bench.base.arrays import FloatArray

# The round trip of least delay counts; a loaded host may delay some.
ROUND_TRIPS = 4


def clock_offset(control: dist.ProcessGroup, timer: Callable[[], float]) -> float:
    """Seconds to add to this rank's clock for that of rank 0; collective over all ranks.

    As NTP does (RFC 5905, section 8), a rank asks rank 0 for its time, and takes the middle of its shortest round trip
    for the moment of the answer: wrong by half of that trip at most, if clocks run equally fast.
    """
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
    """Action, start and end by rank ``[ranks][actions, 3]``, in seconds since the first rank began, not each its own.

    ``began_s`` is when each began, on the clock of rank 0 ``[ranks]``.
    """
    first = min(began_s)
    return [own + np.array([0.0, s - first, s - first]) for own, s in zip(rows, began_s, strict=True)]
