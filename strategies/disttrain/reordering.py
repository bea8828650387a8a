"""Both reorderings of DistTrain (arXiv:2408.04275, section 5) as pure functions of sizes and times."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np
from numba import njit

from entrain_bench.arrays import FloatArray, IntArray


def balanced_groups(size: FloatArray, num_groups: int, load: FloatArray | None = None) -> IntArray:
    """Group of each sample by LPT: by falling size, each to the least-loaded group that has a free place.

    Every group takes ``ceil(samples / groups)`` samples at most. Without that capacity the heaviest group is within
    4/3 of the best; with it the bound is proven for three samples a group, and two a group are optimal. Equal loads go
    to the group with fewer samples, so that samples without encoder work are dealt out.

    Args:
        size: encoder size ``[samples]``.
        num_groups: data-parallel groups.
        load: what each group has already ``[groups]``; nothing if None.

    Returns:
        The group of each sample ``[samples]``.
    """
    capacity = -(-len(size) // num_groups)
    group = np.empty(len(size), np.int64)
    before = np.zeros(num_groups) if load is None else load
    heap = [(float(before[index]), 0, index) for index in range(num_groups)]
    heapify(heap)
    for sample in np.argsort(-size, kind="stable").tolist():
        held, count, index = heappop(heap)
        group[sample] = index
        if count + 1 < capacity:
            heappush(heap, (held + float(size[sample]), count + 1, index))
    return group


def interval_order(forward_s: FloatArray, backward_s: FloatArray) -> IntArray:
    """Order of a replica's microbatches that fills the first stage's idle intervals under 1F1B.

    The smallest microbatch comes first, the p - 1 smallest others last (by rising size); the first interval takes the
    p - 1 microbatches whose forwards at the first stage sum closest to it, every later one the microbatch closest.
    Interval i is the first stage's idle time until backward i arrives, if nothing filled it (reconstructed). Transfers
    count as free. O(l (l + p)), and O(l p) once for the first interval.

    Args:
        forward_s: forward seconds of each microbatch at each stage of the chain ``[microbatches, stages]``.
        backward_s: backward seconds, likewise.

    Returns:
        The microbatches in their new order ``[microbatches]``.
    """
    if forward_s.shape[1] == 1:  # no pipeline, no intervals
        return np.arange(len(forward_s))
    return np.asarray(_fill(np.ascontiguousarray(forward_s), np.ascontiguousarray(backward_s)))


@njit(cache=True)
def _fill(forward_s, backward_s):  # type: ignore[no-untyped-def]
    count, stages = forward_s.shape
    rising = np.argsort(forward_s.sum(axis=1), kind="mergesort")
    order = np.empty(count, np.int64)
    order[0] = rising[0]
    num_rear = min(stages - 1, count - 1)
    order[count - num_rear :] = rising[1 : 1 + num_rear]
    rest = rising[1 + num_rear :]
    rest = rest[np.argsort(forward_s[rest, 0], kind="mergesort")]
    if len(rest) == 0:
        return order
    interval = forward_s[order[0], 1:].sum() + backward_s[order[0], 1:].sum()
    picked = _closest_sum(forward_s[rest, 0], min(stages - 1, len(rest)), interval)
    order[1 : 1 + picked.sum()] = rest[picked]
    rest = rest[~picked]
    if len(rest) == 0:
        return order

    # The first p microbatches are known. Stage s runs p - 1 - s forwards ahead of backward 0 and one forward per
    # backward from then on; last[s] is the end of its latest forward, free[s] of its latest backward.
    last = np.zeros(stages)
    free = np.zeros(stages)
    arrived = np.zeros(stages)
    for stage in range(stages):
        now = 0.0
        for position in range(stages - stage):
            now = max(now, arrived[position]) + forward_s[order[position], stage]
            arrived[position] = now
        last[stage] = now
    done = 0.0
    for stage in range(stages - 1, -1, -1):
        done = max(done, last[stage]) + backward_s[order[0], stage]
        free[stage] = done
    left = len(rest)
    step = 0
    while left > 0:
        step += 1
        for stage in range(stages - 1, 0, -1):
            position = step + stages - 1 - stage
            last[stage] = max(free[stage], last[stage - 1]) + forward_s[order[position], stage]
        done = 0.0
        for stage in range(stages - 1, 0, -1):
            done = max(done, last[stage]) + backward_s[order[step], stage]
            free[stage] = done
        interval = done - free[0]
        best = 0
        for index in range(1, left):
            if abs(forward_s[rest[index], 0] - interval) < abs(forward_s[rest[best], 0] - interval):
                best = index
        chosen = rest[best]
        for index in range(best, left - 1):
            rest[index] = rest[index + 1]
        left -= 1
        order[stages - 1 + step] = chosen
        last[0] = free[0] + forward_s[chosen, 0]
        free[0] = max(last[0], done) + backward_s[order[step], 0]
    return order


@njit(cache=True)
def _closest_sum(rising, number, target):  # type: ignore[no-untyped-def]
    """Which ``number`` of the rising values sum close to the target: the best run of neighbours, then the best swap."""
    picked = np.zeros(len(rising), np.bool_)
    total = rising[:number].sum()
    best_total, first = total, 0
    for start in range(1, len(rising) - number + 1):
        total += rising[start + number - 1] - rising[start - 1]
        if abs(total - target) < abs(best_total - target):
            best_total, first = total, start
    picked[first : first + number] = True
    out, into, closest = -1, -1, abs(best_total - target)
    for inside in range(first, first + number):
        for outside in range(len(rising)):
            if not picked[outside]:
                miss = abs(best_total - rising[inside] + rising[outside] - target)
                if miss < closest:
                    out, into, closest = inside, outside, miss
    if out >= 0:
        picked[out] = False
        picked[into] = True
    return picked
