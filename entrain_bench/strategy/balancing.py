"""Units dealt out to equal bins: longest first, in every row by itself."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
from numba import njit

from entrain_bench.arithmetic import decisive
from entrain_bench.arrays import FloatArray, IntArray


def longest_first(cost: FloatArray, row: IntArray, num_bins: int) -> IntArray:
    """Bin of each unit by LPT within its row: by falling cost, each to the bin with the least so far.

    The fullest bin of a row is within ``4/3 - 1 / (3 num_bins)`` of the best (Graham, SIAM J. Appl. Math. 17, 1969).
    Equal costs go by index, equal bins by number.

    Args:
        cost: of each unit, not negative ``[units]``.
        row: which units are dealt out together, not negative ``[units]``.
        num_bins: bins of every row.

    Returns:
        ``[units]``.
    """
    rounded = decisive(cost)
    order = np.lexsort((-rounded, row))
    result: IntArray = _deal(order, rounded, row, num_bins)
    return result


@njit(cache=True)
def _deal(order, cost, row, num_bins):  # type: ignore[no-untyped-def]
    """``longest_first`` of units in their order, row by row."""
    bins = np.empty(len(order), np.int64)
    least = [(0.0, index) for index in range(num_bins)]
    before = -1
    for unit in order:
        if row[unit] != before:
            before = row[unit]
            # Equal loads by rising number are a heap already.
            least = [(0.0, index) for index in range(num_bins)]
        load, index = heappop(least)
        bins[unit] = index
        heappush(least, (load + cost[unit], index))
    return bins


def arrival_places(num_samples: int, microbatch_size: int, dp: int) -> tuple[IntArray, IntArray]:
    """Replica and microbatch of each sample in order of arrival ``[samples]``.

    Consecutive samples fill a microbatch; microbatches go round the replicas, as with Megatron's data sampler. Where
    samples do not fill one of every replica, microbatches are smaller.
    """
    microbatch = np.arange(num_samples) // max(1, min(microbatch_size, -(-num_samples // dp)))
    return microbatch % dp, microbatch // dp
