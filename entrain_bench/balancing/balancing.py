"""Units dealt out to equal bins: longest first, in every row by itself."""

from __future__ import annotations

import numpy as np

from entrain_bench.balancing.filling import deal
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import FloatArray, IntArray


def longest_first_by_row(cost: FloatArray, row: IntArray, num_bins: int) -> IntArray:
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
