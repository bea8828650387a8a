"""FlexSP's dynamic programs: microbatches of consecutive lengths, and buckets of lengths."""

from __future__ import annotations

import numpy as np

from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.compiled import njit


def blasted(size: FloatArray, count: int) -> IntArray:
    """Microbatch of each sequence: ``count`` consecutive ones whose largest sum is least (appendix A) ``[sequences]``.

    Bisection over the largest sum, which sequences then fill one microbatch after another; sizes count in integers.

    Args:
        size: of sequences in their order, integers ``[sequences]``.
        count: number of microbatches, at most as many as sequences.
    """
    whole = np.rint(size).astype(np.int64)
    low = int(whole.max(initial=0))
    high = int(whole.sum())
    while low < high:
        middle = (low + high) // 2
        if _consecutive(whole, middle)[-1] < count:
            high = middle
        else:
            low = middle + 1
    microbatch: IntArray = _consecutive(whole, high)
    return microbatch


@njit()
def _consecutive(size, most):  # type: ignore[no-untyped-def]
    microbatch = np.empty(len(size), np.int64)
    number = 0
    filled = 0
    for index in range(len(size)):
        if filled and filled + size[index] > most:
            number = number + 1
            filled = 0
        microbatch[index] = number
        filled += size[index]
    return microbatch


def bucketed(rising: IntArray, count: int) -> IntArray:
    """Bucket of each value so that rounding up to the largest of its bucket adds least ``[values]``.

    ``error[k][q] = min over j of error[j][q - 1] + sum over j < i <= k of (s_k - s_i)``; of equal cuts the first.

    Args:
        rising: values in rising order, integers ``[values]``.
        count: number of buckets at most.
    """
    distinct, which, number = np.unique(rising, return_inverse=True, return_counts=True)
    if len(distinct) <= count:
        return np.asarray(which.ravel(), np.int64)
    bucket: IntArray = _buckets(distinct, number, count)[which.ravel()]
    return bucket


@njit()
def _buckets(value, number, count):  # type: ignore[no-untyped-def]
    """Bucket of each distinct value that occurs so often."""
    size = len(value)
    below = np.zeros(size + 1, np.int64)
    total = np.zeros(size + 1, np.int64)
    for index in range(size):
        below[index + 1] = below[index] + number[index]
        total[index + 1] = total[index] + number[index] * value[index]
    far = np.int64(2**62)
    error = np.full((count + 1, size + 1), far)
    cut = np.zeros((count + 1, size + 1), np.int64)
    error[0, 0] = 0
    for bucket in range(1, count + 1):
        for end in range(1, size + 1):
            for begin in range(end):
                if error[bucket - 1, begin] == far:
                    continue
                added = (below[end] - below[begin]) * value[end - 1] - (total[end] - total[begin])
                if error[bucket - 1, begin] + added < error[bucket, end]:
                    error[bucket, end] = error[bucket - 1, begin] + added
                    cut[bucket, end] = begin
    label = np.empty(size, np.int64)
    end = size
    for bucket in range(count, 0, -1):
        label[cut[bucket, end] : end] = bucket - 1
        end = cut[bucket, end]
    return label
