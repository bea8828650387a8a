"""Units dealt out to bins: longest first, into equal counts or row by row; or by largest differences, compiled.

The method of Karmarkar and Karp (UC Berkeley CSD-82-113, 1982) in its generalisation to k parts (Korf, IJCAI 2009,
section 2.4): partial partitions are merged, the two with the largest differences first, the largest part of one with
the smallest of the other.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np

from entrain_bench.balancing.filling import deal
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.compiled import njit
from entrain_bench.base.errors import require


def balanced_groups(
    size: FloatArray, num_groups: int, load: FloatArray | None = None, fewest_first: bool = True
) -> IntArray:
    """Group of each sample by LPT: by falling size, each to the least-loaded group that has a free place ``[samples]``.

    Every group takes ``ceil(samples / groups)`` samples at most. Without that capacity the heaviest group is within 4/3
    of the best; with it the bound is proven for three samples a group, and two a group are optimal. Groups have
    ``load`` already ``[groups]``; equal loads go to the group with fewer samples, so that samples without work are
    dealt out, or else to the first that has a free place.
    """
    before = np.zeros(num_groups) if load is None else load
    group: IntArray = _fill_groups(np.argsort(-size, kind="stable"), size, before, fewest_first)
    return group


@njit()
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


# Weights in units of the heaviest over this: sums are exact, and equal weights stay equal.
RESOLUTION = 1 << 40


def largest_differencing(weight: IntArray | FloatArray, num_parts: int, equal_count: bool = False) -> IntArray:
    """Part of each item ``[items]``, so that the parts' sums of weights are about equal.

    Parts are numbered by falling sum. Of equal differences the earlier partition goes first, so that equal inputs give
    equal results.

    Args:
        weight: of each item, at least 0; whole numbers are exact, others are rounded to ``RESOLUTION`` ``[items]``.
        num_parts: parts, at least 1.
        equal_count: whether parts have equally many items, or differ by one where the number does not divide. Items of
            neighbouring weight then start in one partition, one in each part.

    Raises:
        UserError: for less than one part.
    """
    require(num_parts >= 1, "parts", num_parts, "at least 1")
    given = np.asarray(weight)
    if not len(given):
        return np.zeros(0, np.int64)
    if not np.issubdtype(given.dtype, np.integer):
        heaviest = float(given.max())
        given = np.rint(given * (RESOLUTION / heaviest)) if heaviest > 0 else np.zeros(len(given))
    group = num_parts if equal_count else 1
    # Where the number does not divide, items without weight fill the lightest partition.
    padded = np.concatenate((given.astype(np.int64), np.zeros(-len(given) % group, np.int64)))
    order = np.argsort(-padded, kind="stable")
    return np.asarray(_merge(padded, order, num_parts, group)[: len(given)])


@njit()
def _merge(weight, order, num_parts, group):  # type: ignore[no-untyped-def]
    """Part of each item: partitions of ``group`` items each, merged two by two.

    A partition keeps the parts that hold anything, by falling sum; all others sum to 0. So there are never more kept
    parts than items.
    """
    count = len(weight)
    # Items of a part are linked: each part is known by its first item, and ends with its last.
    following = np.full(count, -1)
    last = np.arange(count)
    total = weight.copy()
    kept = [order[first : first + group] for first in range(0, count, group)]
    # The largest difference first, then the largest part, then the first partition.
    queue = [(-_difference(parts, total, num_parts), -total[parts[0]], number) for number, parts in enumerate(kept)]
    heapify(queue)
    while len(queue) > 1:
        _, _, mine = heappop(queue)
        _, _, theirs = heappop(queue)
        one = kept[mine]
        two = kept[theirs]
        size = min(num_parts, len(one) + len(two))
        joined = np.empty(size, np.int64)
        joined[: len(one)] = one
        for place in range(len(two)):
            # The largest part of the one with the smallest of the other.
            target = num_parts - 1 - place
            first = two[place]
            if target >= len(one):
                # Empty parts are all alike: those behind the kept ones are taken in turn.
                joined[len(one) + len(two) - 1 - place if len(one) + len(two) <= num_parts else target] = first
                continue
            same = one[target]
            total[same] += total[first]
            following[last[same]] = first
            last[same] = last[first]
        by_sum = np.argsort(-total[joined], kind="mergesort")
        kept[mine] = joined[by_sum]
        kept[theirs] = joined[:0]
        heappush(queue, (-_difference(kept[mine], total, num_parts), -total[kept[mine][0]], mine))
    part = np.empty(count, np.int64)
    final = kept[queue[0][2]]
    for place in range(len(final)):
        item = final[place]
        while item >= 0:
            part[item] = place
            item = following[item]
    return part


@njit()
def _difference(parts, total, num_parts):  # type: ignore[no-untyped-def]
    """Largest less smallest sum of a partition."""
    smallest = total[parts[-1]] if len(parts) == num_parts else 0
    return total[parts[0]] - smallest
