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
    """What to add to this rank's clock for that of rank 0, in seconds; collective over all ranks.

    Each rank asks rank 0 for its time, and takes the middle of the shortest of its round trips for the moment at which
    rank 0 answered (as NTP does, RFC 5905, section 8): wrong by half of that trip at most, if clocks run equally fast.
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
    """What ranks measured, from the moment on at which the first of them began.

    Args:
        rows: action, start and end in seconds since the rank began, by rank ``[ranks][actions, 3]``.
        began_s: when it did, on the clock of rank 0 ``[ranks]``.
    """
    first = min(began_s)
    return [own + np.array([0.0, s - first, s - first]) for own, s in zip(rows, began_s, strict=True)]
