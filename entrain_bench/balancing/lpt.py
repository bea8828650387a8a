"""Units dealt out to bins, longest first: equal counts (``balanced_groups``), or every row by itself."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np
from numba import njit

from entrain_bench.balancing.filling import deal
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import FloatArray, IntArray


def balanced_groups(
    size: FloatArray, num_groups: int, load: FloatArray | None = None, fewest_first: bool = True
) -> IntArray:
    """Group of each sample by LPT: by falling size, each to the least-loaded group that has a free place.

    Every group takes ``ceil(samples / groups)`` samples at most. Without that capacity the heaviest group is within
    4/3 of the best; with it the bound is proven for three samples a group, and two a group are optimal.

    Args:
        size: size of each sample ``[samples]``.
        num_groups: groups.
        load: what each group has already ``[groups]``; nothing if None.
        fewest_first: whether equal loads go to the group with fewer samples, so that samples without work are dealt
            out; otherwise to the first that has a free place.

    Returns:
        The group of each sample ``[samples]``.
    """
    before = np.zeros(num_groups) if load is None else load
    group: IntArray = _fill_groups(np.argsort(-size, kind="stable"), size, before, fewest_first)
    return group


@njit(cache=True)
def _fill_groups(order, size, load, fewest_first):  # type: ignore[no-untyped-def]
    """``balanced_groups`` of samples in their order."""
    capacity = -(-len(size) // len(load))
    group = np.empty(len(size), np.int64)
    filled = np.zeros(len(load), np.int64)
    least = [(load[index], 0, index) for index in range(len(load))]
    heapify(least)
    for sample in order:
        held, _, index = heappop(least)
        group[sample] = index
        filled[index] += 1
        if filled[index] < capacity:
            heappush(least, (held + size[sample], filled[index] if fewest_first else 0, index))
    return group


def longest_first_by_row(cost: FloatArray, row: IntArray, num_bins: int) -> IntArray:
    """Bin of each unit by LPT within its row: by falling cost, each to the bin with the least so far ``[units]``.

    The fullest bin of a row is within ``4/3 - 1 / (3 num_bins)`` of the best (Graham, SIAM J. Appl. Math. 17, 1969).
    Equal costs go by index, equal bins by number. Neither costs nor rows are negative.
    """
    rounded = decisive(cost)
    order = np.argsort(-rounded, kind="stable")
    result: IntArray = deal(order, row, rounded, 1 + int(row.max(initial=-1)), num_bins)
    return result


def arrival_places(num_samples: int, microbatch_size: int, dp: int) -> tuple[IntArray, IntArray]:
    """Replica and microbatch of each sample in order of arrival ``[samples]``.

    Consecutive samples fill a microbatch; microbatches go round the replicas, as with Megatron's data sampler. Where
    samples do not fill one of every replica, microbatches are smaller.
    """
    microbatch = np.arange(num_samples) // max(1, min(microbatch_size, -(-num_samples // dp)))
    return microbatch % dp, microbatch // dp
