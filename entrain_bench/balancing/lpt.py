"""Distribute units over bins, compiled: longest first, with exchanges, into equal counts, or by largest differences."""

from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.compiled import njit

CLOSE = 1e-6  # distance from the trivial bound that counts as optimal; smaller gains do not count
# Limit on the sums that an exchange computes (about 0.2 s; x86-64, 2026-11), and the cost of a bucket in such sums.
EXCHANGE_STEPS = 10_000_000
BUCKET_STEPS = 64


def trivial_bound(cost: FloatArray, num_buckets: int) -> float:
    """Return a lower bound of C_max: the mean of a bucket or the largest item of either cost ``[items, 2]``."""
    return float(max(cost.sum(axis=0).max() / num_buckets, cost.max(initial=0.0)))


def by_falling(cost: FloatArray) -> IntArray:
    """Items by falling max of their two costs ``[items, 2]``."""
    return np.argsort(-cost.max(axis=1), kind="stable")


def longest_first(cost: FloatArray, num_buckets: int, load: FloatArray | None = None) -> IntArray:
    """LPT: items by falling max of their two costs, each to the bucket whose larger sum stays least ``[items]``.

    ``load`` is the initial load of buckets ``[buckets, 2]``.
    """
    before = np.zeros((num_buckets, 2)) if load is None else load
    return np.asarray(_place(by_falling(cost), np.ascontiguousarray(cost, np.float64), before))


def lpt_with_exchange(cost: FloatArray, num_buckets: int, load: FloatArray | None = None) -> IntArray:
    """LPT, then items given or swapped from the fullest bucket for as long as that lowers it (arXiv:2603.25120)."""
    before = np.zeros((num_buckets, 2)) if load is None else load
    bucket = longest_first(cost, num_buckets, before)
    # The last item weighs nothing: swapping with it is giving.
    padded = np.concatenate([cost, np.zeros((1, 2))])
    enough = trivial_bound(cost, num_buckets) * (1 + CLOSE)
    return np.asarray(_exchange(padded, np.append(bucket, -1), before, enough, EXCHANGE_STEPS)[:-1])


@njit()
def deal(order, group, cost, num_bins):  # type: ignore[no-untyped-def]
    """Bin of each item: in the given order, the least-loaded of the bins of its group, ``num_bins`` ``[groups]``."""
    # Equally loaded by rising index, which is a heap.
    least = [[(0.0, one) for one in range(bins)] for bins in num_bins]
    chosen = np.empty(len(order), np.int64)
    for item in order:
        load, best = least[group[item]][0]
        chosen[item] = best
        heapreplace(least[group[item]], (load + cost[item], best))
    return chosen


@njit()
def aligned_first(order, width, seconds, num_ranks):  # type: ignore[no-untyped-def]
    """First rank of each unit's aligned group ``[units]``, and loads ``[ranks]``: in order, the least loaded group."""
    load = np.zeros(num_ranks)
    first = np.zeros(len(width), np.int64)
    for unit in order:
        best = 0
        best_s = np.inf
        for start in range(0, num_ranks - width[unit] + 1, width[unit]):
            if load[start : start + width[unit]].max() < best_s:
                best = start
                best_s = load[start : start + width[unit]].max()
        first[unit] = best
        load[best : best + width[unit]] = best_s + seconds[unit]
    return first, load


@njit()
def _place(order, cost, before):  # type: ignore[no-untyped-def]
    """LPT: to the bucket whose larger sum is least with the item, then whose sum of both is least, then the first."""
    load = before.copy()
    bucket = np.empty(len(order), np.int64)
    for item in order:
        best = (np.inf, np.inf, 0)
        for one in range(len(load)):
            high = max(load[one, 0] + cost[item, 0], load[one, 1] + cost[item, 1])
            rank = (high, load[one, 0] + load[one, 1], one)
            if rank < best:
                best = rank
        bucket[item] = best[2]
        load[best[2]] += cost[item]
    return bucket


@njit()
def _exchange(cost, bucket, before, enough, most_steps):  # type: ignore[no-untyped-def]
    """Exchange until none helps or the fullest bucket is low enough; the last item weighs 0 and is in every bucket."""
    nothing = len(bucket) - 1
    load = before.copy()
    for item in range(nothing):
        load[bucket[item]] += cost[item]
    larger = np.maximum(load[:, 0], load[:, 1])
    steps = 0
    while steps < most_steps and larger.max() > enough:
        full = larger.argmax()
        mine = np.flatnonzero(bucket == full)
        given = -1
        for other in np.argsort(larger, kind="mergesort"):
            theirs = np.append(np.flatnonzero(bucket == other), nothing)
            given, taken = _best_swap(mine, theirs, load[full], load[other], cost, larger[full] * (1 - CLOSE))
            steps += BUCKET_STEPS + len(mine) * len(theirs)
            if given >= 0:
                load[full] += cost[taken] - cost[given]
                load[other] += cost[given] - cost[taken]
                bucket[given] = other
                if taken != nothing:
                    bucket[taken] = full
                larger[full] = max(load[full, 0], load[full, 1])
                larger[other] = max(load[other, 0], load[other, 1])
                break
        if given < 0:
            break
    return bucket


@njit()
def _best_swap(mine, theirs, my_load, their_load, cost, below):  # type: ignore[no-untyped-def]
    """The items of two buckets whose exchange makes the fuller one lowest, below a bound; -1 if there are none."""
    given = -1
    taken = -1
    for one in mine:
        for two in theirs:
            first = cost[one, 0] - cost[two, 0]
            second = cost[one, 1] - cost[two, 1]
            left = max(my_load[0] - first, my_load[1] - second)
            after = max(left, their_load[0] + first, their_load[1] + second)
            if after < below:
                below = after
                given = one
                taken = two
    return given, taken


def balanced_groups(
    size: FloatArray, num_groups: int, load: FloatArray | None = None, fewest_first: bool = True
) -> IntArray:
    """Return the group of each sample by LPT, equally many in each ``[samples]``; ``load``: initial ``[groups]``."""
    before = np.zeros(num_groups) if load is None else load
    group: IntArray = fill_groups(np.argsort(-size, kind="stable"), size, before, fewest_first)
    return group


@njit()
def fill_groups(order, size, load, fewest_first):  # type: ignore[no-untyped-def]
    """``balanced_groups`` of samples in the given order."""
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


def balanced_in_steps(size: FloatArray, num_groups: int, step: int, carry: bool, fewest_first: bool = True) -> IntArray:
    """Group of each sample by ``balanced_groups`` among ``step`` consecutive ones; ``carry``: earlier loads count."""
    group = np.empty(len(size), np.int64)
    load = np.zeros(num_groups)
    for first in range(0, len(size), step):
        part = slice(first, first + step)
        group[part] = balanced_groups(size[part], num_groups, load, fewest_first)
        if carry:
            load += np.bincount(group[part], weights=size[part], minlength=num_groups)
    return group


def place_in_group(group: IntArray) -> IntArray:
    """Place of each entry among those of its group, in order ``[entries]``."""
    counts = np.bincount(group)
    place = np.empty(len(group), np.int64)
    place[np.argsort(group, kind="stable")] = np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)
    return place


@njit()
def next_fit(size, order, room):  # type: ignore[no-untyped-def]
    """Bin of each entry, in the given order: the open one, or a new one if it does not fit into that ``[entries]``."""
    chosen = np.empty(len(order), np.int64)
    current = 0
    left = room
    for place, entry in enumerate(order):
        if size[entry] > left and place:
            current += 1
            left = room
        chosen[entry] = current
        left = left - size[entry]
    return chosen


def longest_first_by_row(cost: FloatArray, row: IntArray, num_bins: int) -> IntArray:
    """Bin of each unit by LPT within its row: by falling cost, each to the bin with the least so far ``[units]``."""
    rounded = decisive(cost)
    order = np.argsort(-rounded, kind="stable")
    result: IntArray = deal(order, row, rounded, np.full(1 + int(row.max(initial=-1)), num_bins))
    return result


def arrival_places(num_samples: int, microbatch_size: int, dp: int) -> tuple[IntArray, IntArray]:
    """Replica and microbatch of each sample in order of arrival, as with Megatron's data sampler ``[samples]``."""
    microbatch = np.arange(num_samples) // max(1, min(microbatch_size, -(-num_samples // dp)))
    return microbatch % dp, microbatch // dp


RESOLUTION = 1 << 40  # weights in units of the heaviest over this: sums are exact, and equal weights stay equal


def largest_differencing(weight: IntArray | FloatArray, num_parts: int, equal_count: bool = False) -> IntArray:
    """Part of each item ``[items]``, so that the parts' sums of weights are about equal, numbered by falling sum.

    The method of Karmarkar and Karp for k parts (Korf, IJCAI 2009, section 2.4). ``equal_count``: within one item.
    """
    given = np.asarray(weight)
    if not len(given):
        return np.zeros(0, np.int64)
    if not np.issubdtype(given.dtype, np.integer):
        given = np.rint(given * (RESOLUTION / (float(given.max()) or 1.0)))
    group = num_parts if equal_count else 1
    # Where the number does not divide, items without weight fill the lightest partition.
    padded = np.concatenate((given.astype(np.int64), np.zeros(-len(given) % group, np.int64)))
    order = np.argsort(-padded, kind="stable")
    return np.asarray(_merge(padded, order, num_parts, group)[: len(given)])


@njit()
def _merge(weight, order, num_parts, group):  # type: ignore[no-untyped-def]
    """Part of each item: partitions of ``group`` items each, merged two by two."""
    count = len(weight) // group
    # Parts of a partition by falling sum; each is a chain of items from its first to its last.
    total = np.zeros((count, num_parts), np.int64)
    first = np.full((count, num_parts), -1)
    last = np.full((count, num_parts), -1)
    following = np.full(len(weight), -1)
    for place, item in enumerate(order):
        total[place // group, place % group] = weight[item]
        first[place // group, place % group] = last[place // group, place % group] = item
    # The largest difference first, then the largest part, then the first partition.
    queue = [(row[-1] - row[0], -row[0], number) for number, row in enumerate(total)]
    heapify(queue)
    while len(queue) > 1:
        one = heappop(queue)[2]
        other = heappop(queue)[2]
        for part in range(num_parts):
            # The largest part of the one with the smallest of the other.
            head = first[other, num_parts - 1 - part]
            if head >= 0:
                if first[one, part] < 0:
                    first[one, part] = head
                else:
                    following[last[one, part]] = head
                last[one, part] = last[other, num_parts - 1 - part]
        total[one] += total[other, ::-1]
        # Empty parts come last.
        by_sum = np.argsort(-2 * total[one] - (first[one] >= 0), kind="mergesort")
        total[one] = total[one][by_sum]
        first[one] = first[one][by_sum]
        last[one] = last[one][by_sum]
        heappush(queue, (total[one, -1] - total[one, 0], -total[one, 0], one))
    parts = np.empty(len(weight), np.int64)
    for place, item in enumerate(first[queue[0][2]]):
        while item >= 0:
            parts[item] = place
            item = following[item]
    return parts
