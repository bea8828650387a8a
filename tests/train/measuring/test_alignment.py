"""Clocks of ranks brought to one."""

from __future__ import annotations

from functools import partial
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist

from entrain_bench.train.measuring.clock import Clock, clock_offset, on_one_clock
from support.train.ranks import run_ranks

AHEAD_S = 1000.0


def ahead(rank: int) -> float:
    """A clock that is ahead of this machine's by as many times ``AHEAD_S`` as the rank's number."""
    return perf_counter() + AHEAD_S * rank


def offsets(rank: int) -> tuple[float, float, float]:
    """A rank's offset to rank 0, when it began together with the others, and what time it is there."""
    clock = Clock(torch.device("cpu"), timer=partial(ahead, rank))
    clock.start_together(dist.group.WORLD)
    return clock_offset(dist.group.WORLD, partial(ahead, rank)), clock.began_s, perf_counter()


def test_offsets_take_clocks_to_that_of_the_first_rank() -> None:
    # Ranks of one machine have one clock, so the offsets are known; a loaded machine answers late.
    for rank, (offset, began_s, now_s) in enumerate(run_ranks(offsets, 3)):
        assert abs(offset + AHEAD_S * rank) < 1.0
        assert abs(began_s - now_s) < 30.0


def test_actions_count_from_the_moment_at_which_the_first_rank_began() -> None:
    rows = [np.array([[7.0, 0.5, 1.0]]), np.zeros((0, 3)), np.array([[3.0, 0.0, 2.0], [4.0, 2.0, 2.5]])]
    aligned = on_one_clock(rows, [10.25, 11.0, 10.0])
    np.testing.assert_array_equal(aligned[0], [[7.0, 0.75, 1.25]])
    assert aligned[1].shape == (0, 3)
    np.testing.assert_array_equal(aligned[2], rows[2])
