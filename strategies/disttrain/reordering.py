"""Both reorderings of DistTrain (arXiv:2408.04275, section 5) as pure functions of sizes and times."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.compiled import inlined


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
    order: IntArray = _fill(np.ascontiguousarray(forward_s), np.ascontiguousarray(backward_s))
    return order


class Ends(NamedTuple):
    """How far a replica's 1F1B is known: ends of the latest forward and the latest backward ``[stages]``."""

    forward_s: FloatArray
    backward_s: FloatArray


@njit(cache=True)
def _fill(forward_s, backward_s):  # type: ignore[no-untyped-def]
    """``interval_order`` of two stages or more."""
    order, rest = _front_and_rear(forward_s)
    rest = _fill_first(rest, order, forward_s, backward_s)
    if len(rest) > 0:
        _fill_later(rest, order, forward_s, backward_s)
    return order


@njit(cache=True)
def _front_and_rear(forward_s):  # type: ignore[no-untyped-def]
    """The order with its first and its last microbatches, and the others by rising forward at the first stage."""
    count, stages = forward_s.shape
    rising = np.argsort(forward_s.sum(axis=1), kind="mergesort")
    num_rear = min(stages - 1, count - 1)
    order = np.empty(count, np.int64)
    order[0] = rising[0]
    order[count - num_rear :] = rising[1 : 1 + num_rear]
    rest = rising[1 + num_rear :]
    return order, rest[np.argsort(forward_s[rest, 0], kind="mergesort")]


@njit(cache=True)
def _fill_first(rest, order, forward_s, backward_s):  # type: ignore[no-untyped-def]
    """Put microbatches into the first interval, which has room for p - 1; returns the others, rising."""
    stages = forward_s.shape[1]
    interval_s = forward_s[order[0], 1:].sum() + backward_s[order[0], 1:].sum()
    picked = _closest_sum(forward_s[rest, 0], min(stages - 1, len(rest)), interval_s)
    order[1 : 1 + picked.sum()] = rest[picked]
    return rest[~picked]


@njit(cache=True)
def _fill_later(rest, order, forward_s, backward_s):  # type: ignore[no-untyped-def]
    """Put one microbatch after the other into the interval before backward 1, 2, ... of the first stage."""
    stages = forward_s.shape[1]
    ends = _warm_up(order, forward_s, backward_s)
    first_s = forward_s[rest, 0]
    for step in range(1, len(rest) + 1):
        arrival_s = _arrival(step, order, forward_s, backward_s, ends)
        chosen = _take_closest(rest, first_s, len(rest) + 1 - step, arrival_s - ends.backward_s[0])
        order[stages - 1 + step] = chosen
        ends.forward_s[0] = ends.backward_s[0] + forward_s[chosen, 0]
        ends.backward_s[0] = max(ends.forward_s[0], arrival_s) + backward_s[order[step], 0]


@njit(cache=True)
def _warm_up(order, forward_s, backward_s):  # type: ignore[no-untyped-def]
    """Everything up to backward 0; the first p microbatches of the order are known.

    Stage s is p - 1 - s forwards ahead of backward 0 and does one forward for each backward from then on.
    """
    stages = forward_s.shape[1]
    ends = Ends(np.zeros(stages), np.zeros(stages))
    arrived_s = np.zeros(stages)  # Of each microbatch at the stage.
    for stage in range(stages):
        now_s = 0.0
        for position in range(stages - stage):
            now_s = max(now_s, arrived_s[position]) + forward_s[order[position], stage]
            arrived_s[position] = now_s
        ends.forward_s[stage] = now_s
    now_s = 0.0
    for stage in range(stages - 1, -1, -1):
        now_s = max(now_s, ends.forward_s[stage]) + backward_s[order[0], stage]
        ends.backward_s[stage] = now_s
    return ends


@inlined
def _arrival(step, order, forward_s, backward_s, ends):  # type: ignore[no-untyped-def]
    """When a backward's gradient comes to the first stage; each stage before that does a forward, then the backward."""
    stages = forward_s.shape[1]
    # Last stage first: each takes the microbatch whose forward the stage before it has done a step ago.
    for stage in range(stages - 1, 0, -1):
        position = step + stages - 1 - stage
        before_s = max(ends.backward_s[stage], ends.forward_s[stage - 1])
        ends.forward_s[stage] = before_s + forward_s[order[position], stage]
    now_s = 0.0
    for stage in range(stages - 1, 0, -1):
        now_s = max(now_s, ends.forward_s[stage]) + backward_s[order[step], stage]
        ends.backward_s[stage] = now_s
    return now_s


@inlined
def _take_closest(rest, first_s, count, interval_s):  # type: ignore[no-untyped-def]
    """Take out of the first ``count`` the microbatch whose forward at the first stage is closest to an interval.

    Of two equally close the one that comes first, which is the smaller: they are in rising order, and stay so.
    """
    best = 0
    for place in range(1, count):
        if abs(first_s[place] - interval_s) < abs(first_s[best] - interval_s):
            best = place
    chosen = rest[best]
    for place in range(best, count - 1):
        rest[place], first_s[place] = rest[place + 1], first_s[place + 1]
    return chosen


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
