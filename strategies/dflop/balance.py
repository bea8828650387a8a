"""Buckets of equal cost (arXiv:2603.25120, online microbatch scheduler): LPT, then an anytime solver of the ILP.

Minimise C_max with every item in one bucket, and the sums of encoder durations and of LLM durations of every bucket at
most C_max. All of it is deterministic: work is limited in steps, never in seconds.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from entrain_bench.arrays import FloatArray, IntArray


def trivial_bound(cost: FloatArray, num_buckets: int) -> float:
    """No assignment has a C_max below the mean of a bucket or the largest item of either cost ``[items, 2]``."""
    if not len(cost):
        return 0.0
    return float(max(cost.sum(axis=0).max() / num_buckets, cost.max()))


def makespan(cost: FloatArray, bucket: IntArray, num_buckets: int) -> float:
    """C_max: the largest sum of either cost over a bucket."""
    return max(float(np.bincount(bucket, weights=column, minlength=num_buckets).max()) for column in cost.T)


def balance(cost: FloatArray, num_buckets: int, max_steps: int) -> IntArray:
    """Bucket of each item ``[items]``: the solver's if it beats LPT's within its steps, else LPT's.

    Args:
        cost: encoder and LLM duration of each item ``[items, 2]``.
        num_buckets: buckets.
        max_steps: placements the solver may try; 0 leaves LPT's.
    """
    cost = np.ascontiguousarray(cost, np.float64)
    start = longest_first(cost, num_buckets)
    if not max_steps or not len(cost):
        return start
    found, _ = solve(cost, num_buckets, start, trivial_bound(cost, num_buckets), max_steps)
    return found if makespan(cost, found, num_buckets) < makespan(cost, start, num_buckets) else start


def longest_first(cost: FloatArray, num_buckets: int) -> IntArray:
    """LPT: items by falling max of their two costs, each to the bucket whose larger sum stays least."""
    return np.asarray(_place(np.argsort(-cost.max(axis=1), kind="stable"), cost, num_buckets))


def solve(cost: FloatArray, num_buckets: int, start: IntArray, bound: float, max_steps: int) -> tuple[IntArray, int]:
    """Local search from ``start`` on half of the steps, then branch and bound on the rest.

    Returns:
        The best assignment seen, optimal if the branch and bound ends before its steps do, and the steps taken.
    """
    found = start.copy()
    steps = int(_improve(cost, num_buckets, found, bound, max_steps // 2))
    order = np.argsort(-cost.max(axis=1), kind="stable")
    steps += int(_branch(order, cost, num_buckets, found, bound, max_steps - steps))
    return found, steps


@njit(cache=True)
def deal(order, group, cost, num_groups, num_bins):  # type: ignore[no-untyped-def]
    """Bin of each item: in the given order, the least-loaded bin of its group (LPT inside every group)."""
    load = np.zeros((num_groups, num_bins))
    chosen = np.empty(len(order), np.int64)
    for item in order:
        row = load[group[item]]
        best = np.argmin(row)
        chosen[item] = best
        row[best] += cost[item]
    return chosen


@njit(cache=True)
def _place(order, cost, num_buckets):  # type: ignore[no-untyped-def]
    load = np.zeros((num_buckets, 2))
    bucket = np.empty(len(order), np.int64)
    for item in order:
        best, best_high, best_sum = -1, np.inf, np.inf
        for b in range(num_buckets):
            high = max(load[b, 0] + cost[item, 0], load[b, 1] + cost[item, 1])
            if high < best_high or (high == best_high and load[b, 0] + load[b, 1] < best_sum):
                best, best_high, best_sum = b, high, load[b, 0] + load[b, 1]
        bucket[item] = best
        load[best] += cost[item]
    return bucket


@njit(cache=True)
def _improve(cost, num_buckets, bucket, bound, max_steps):  # type: ignore[no-untyped-def]
    """Move an item out of the fullest bucket or swap it, as long as that makes both buckets smaller; in place."""
    load = np.zeros((num_buckets, 2))
    for item in range(len(bucket)):
        load[bucket[item]] += cost[item]
    steps = 0
    while True:
        full, high = 0, -1.0
        for b in range(num_buckets):
            if max(load[b, 0], load[b, 1]) > high:
                full, high = b, max(load[b, 0], load[b, 1])
        goal = high * (1 - 1e-9)
        if high <= bound * (1 + 1e-9):
            return steps
        best, moved, other = goal, -1, -1
        for item in range(len(bucket)):
            if bucket[item] != full:
                continue
            steps += num_buckets + len(bucket)
            if steps > max_steps:
                return max_steps
            for target in range(num_buckets + len(bucket)):
                swap = target - num_buckets
                to = bucket[swap] if swap >= 0 else target
                if to == full:
                    continue
                worst = 0.0
                for c in range(2):
                    delta = cost[item, c] - (cost[swap, c] if swap >= 0 else 0.0)
                    worst = max(worst, load[full, c] - delta, load[to, c] + delta)
                if worst < best:
                    best, moved, other = worst, item, target
        if moved < 0:
            return steps
        swap = other - num_buckets
        to = bucket[swap] if swap >= 0 else other
        load[full] -= cost[moved]
        load[to] += cost[moved]
        bucket[moved] = to
        if swap >= 0:
            load[to] -= cost[swap]
            load[full] += cost[swap]
            bucket[swap] = full


@njit(cache=True)
def _branch(order, cost, num_buckets, bucket, bound, max_steps):  # type: ignore[no-untyped-def]
    """Depth-first search over the items in order, the bucket that stays least full first; improves in place.

    Buckets with the same sums are one choice. A step is one bucket looked at.
    """
    count = len(order)
    load = np.zeros((num_buckets, 2))
    for item in range(count):
        load[bucket[item]] += cost[item]
    incumbent = load.max()
    load[:] = 0.0
    before = np.zeros((count, 2))
    chosen = np.full(count, -1)
    tried = np.zeros((count, num_buckets), np.bool_)
    depth, steps = 0, 0
    while depth >= 0 and incumbent > bound * (1 + 1e-9) and steps + num_buckets <= max_steps:
        item = order[depth]
        if chosen[depth] >= 0:
            load[chosen[depth]] = before[depth]
            chosen[depth] = -1
        best, best_high = -1, incumbent * (1 - 1e-12)
        for b in range(num_buckets):
            steps += 1
            high = max(load[b, 0] + cost[item, 0], load[b, 1] + cost[item, 1])
            if tried[depth, b] or high >= best_high:
                continue
            same = False
            for t in range(num_buckets):
                if tried[depth, t] and load[t, 0] == load[b, 0] and load[t, 1] == load[b, 1]:
                    same = True
                    break
            if not same:
                best, best_high = b, high
        if best < 0:
            tried[depth] = False
            depth -= 1
            continue
        tried[depth, best] = True
        chosen[depth] = best
        before[depth] = load[best]
        load[best] += cost[item]
        if depth + 1 < count:
            depth += 1
            continue
        incumbent = load.max()
        for d in range(count):
            bucket[order[d]] = chosen[d]
    return steps
