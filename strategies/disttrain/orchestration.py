"""DistTrain's orchestration problem (arXiv:2408.04275, section 4): GPUs of each group of modules, a convex program.

With TP of every group and DP of the backbone fixed, C_u the seconds per sample and w_u = DP_lm TP_u M C_u the
GPU-seconds of a pipeline step, T = M C_lm + sum over u != lm of w_u / x_u + (BS / (DP_lm M) - 1) max over u of w_u /
x_u (reconstructed). With the slowest step fixed, every group gets what keeps it within that step, and the rest of the
GPUs goes where it shortens the warm-up most: x_u = y sqrt(w_u), one y for all, as far as bounds allow. The slowest step
is bisected to the last bits, by the sign of the derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from entrain_bench.base.arithmetic import DECISIVE_BITS, decisive
from entrain_bench.base.arrays import BoolArray, FloatArray
from entrain_bench.base.compiled import inlined, njit

# Of an interval, until no number lies between its ends.
HALVINGS = 100
# The encoder's, the backbone and the generator's.
MOST_GROUPS = 3
# Rounding to decisive digits brings no two numbers together that are further apart, relative to the smaller.
DECISIVE_SLACK = 2.0 ** (2 - DECISIVE_BITS)


@dataclass(frozen=True, slots=True)
class GroupLoads:
    """The groups of several problems, ``[problems, groups]`` where nothing else is said."""

    gpu_s: FloatArray  # GPU-seconds of one pipeline step, w_u
    fewest: FloatArray  # GPUs below which the group does not exist or exceeds memory
    most: FloatArray  # GPUs beyond which it cannot be split
    fills: BoolArray  # whether its pass is part of the warm-up ``[groups]``; the backbone's does not depend on its GPUs


def iteration_s(loads: GroupLoads, gpus: FloatArray, num_steps: int) -> FloatArray:
    """T without its constant M C_lm, for GPUs ``[problems, groups]``; ``[problems]``, not a number where they are."""
    step = loads.gpu_s / gpus
    return np.asarray(step[:, loads.fills].sum(axis=1) + (num_steps - 1) * step.max(axis=1))


def solve(loads: GroupLoads, num_gpus: int, num_steps: int) -> FloatArray:
    """GPUs of each group, real numbers, that minimise ``iteration_s`` ``[problems, groups]``; NaN if none are enough.

    All groups together have ``num_gpus`` at most; an iteration has ``num_steps`` pipeline steps, BS / (DP_lm M).
    """
    most = np.minimum(loads.most, float(num_gpus))
    feasible = np.all(loads.fewest <= most, axis=1) & (loads.fewest.sum(axis=1) <= num_gpus)
    gpus = np.full(loads.gpu_s.shape, np.nan)
    work, fewest, most = (column[feasible] for column in (loads.gpu_s, loads.fewest, most))
    warms = loads.fills.astype(np.float64)
    gpus[feasible] = _bisect_steps(work, fewest, most, warms, float(num_gpus), num_steps - 1.0)
    return gpus


class GroupProblem(NamedTuple):
    """One of several problems; arrays ``[groups]``."""

    work: FloatArray
    weight: FloatArray
    warms: FloatArray
    fewest: FloatArray
    most: FloatArray
    num_gpus: float


@njit()
def _bisect_steps(work, fewest, most, warms, num_gpus, num_more_steps):  # type: ignore[no-untyped-def]
    """The GPUs of least T; arguments as in ``GroupLoads``, ``warms`` 1.0 for groups that fill."""
    gpus = np.empty_like(work)
    weight = warms * np.sqrt(work)
    for problem in range(len(work)):
        one = GroupProblem(work[problem], weight[problem], warms, fewest[problem], most[problem], num_gpus)
        _bisect_step(one, np.empty(work.shape[1]), gpus[problem], num_more_steps)
    return gpus


@inlined
def _bisect_step(one, least, gpus, num_more_steps):  # type: ignore[no-untyped-def]
    """Leaves a problem's GPUs in ``gpus``; ``least`` is used on the way."""
    # The slowest step lies between what it is with all the GPUs a group may have and with the fewest.
    low = 0.0
    high = 0.0
    for group in range(len(gpus)):
        low = max(low, one.work[group] / one.most[group])
        high = max(high, one.work[group] / one.fewest[group])
    for _ in range(HALVINGS):
        before = (low, high)
        step = low + (high - low) / 2
        _keep_within(one, step, least)
        root = _share_out(one, least, gpus)
        # What a longer step saves of the warm-up, per second of it; without limit where there are too few GPUs.
        saved = np.inf if root == 0.0 else 0.0
        for group in range(len(gpus)):
            if root > 0.0 and least[group] > one.fewest[group]:
                saved += max(0.0, (gpus[group] / root) ** 2 / one.work[group] - one.warms[group])
        if saved > num_more_steps:
            low = step
        else:
            high = step
        if before == (low, high):
            break  # Every further turn would be like this one.
    _keep_within(one, high, least)
    _share_out(one, least, gpus)


@inlined
def _keep_within(one, step, least):  # type: ignore[no-untyped-def]
    """The GPUs that every group needs for a step, into ``least``."""
    for group in range(len(least)):
        least[group] = one.fewest[group] if step == 0.0 else max(one.fewest[group], one.work[group] / step)


@inlined
def _share_out(one, least, gpus):  # type: ignore[no-untyped-def]
    """GPUs of the shortest warm-up, at least ``least``, into ``gpus``, and the root y; 0 if not even those are there.

    Their sum rises with y along straight lines that meet where a group leaves its least or reaches its most. Infinite
    y: groups may have no more.
    """
    last = 0.0
    high = 0.0
    sum_there = 0.0
    for group in range(len(gpus)):
        if one.weight[group] > 0.0:
            high = max(high, one.most[group] / one.weight[group])
            for gpus_there in (least[group], one.most[group]):
                root = gpus_there / one.weight[group]
                total = _give(one, least, root, gpus)
                if total <= one.num_gpus and root >= last:
                    last = root
                    sum_there = total
    if last == high:
        _give(one, least, high, gpus)
        return np.inf
    if last > 0.0:
        slope = 0.0
        for group in range(len(gpus)):
            if (
                one.weight[group] > 0.0
                and least[group] / one.weight[group] <= last < one.most[group] / one.weight[group]
            ):
                slope += one.weight[group]
        # Rounding may carry a least past its most, and the root with it: nothing can grow then.
        if slope > 0.0:
            last += (one.num_gpus - sum_there) / slope
    _give(one, least, last, gpus)
    return last


@inlined
def _give(one, least, root, gpus):  # type: ignore[no-untyped-def]
    """The GPUs under a root, into ``gpus``, and their sum."""
    total = 0.0
    for group in range(len(gpus)):
        gpus[group] = min(max(least[group], root * one.weight[group]), one.most[group])
        total += gpus[group]
    return total


# Integer options of a group, with the rest of the sub-problem fixed: GPUs, PP, seconds of a step through all stages and
# at the slowest stage, DP ``[5, options]``.
RANKS, STAGES, FILL, SLOWEST, REPLICAS = range(5)


def undominated(options: FloatArray) -> FloatArray:
    """Options without those that another one betters or equals in ranks, fill and slowest stage."""
    order = np.lexsort((options[SLOWEST], options[FILL], options[RANKS]))
    return options[:, order[_undominated(options[FILL][order], options[SLOWEST][order])]]


@njit()
def _undominated(fill_s, slowest_s):  # type: ignore[no-untyped-def]
    """Places of the options that none before them betters or equals in both."""
    kept = np.empty(len(fill_s), np.int64)
    count = 0
    for index in range(len(fill_s)):
        for place in kept[:count]:
            if fill_s[place] <= fill_s[index] and slowest_s[place] <= slowest_s[index]:
                break
        else:
            kept[count] = index
            count += 1
    return kept[:count]


type Point = tuple[tuple[int, int], ...]
"""(DP, PP) of every group."""


def best_integers(
    groups: Sequence[FloatArray], num_ranks: int, num_steps: int, keep: int, num_stages: int | None = None
) -> list[tuple[float, Point]]:
    """The ``keep`` points with the least T: one option a group, a step through all, the slowest stage for the rest.

    At most three groups have at most ``num_ranks`` together, and ``num_stages`` if given. Returns seconds and point,
    best first; of equal points those of earlier options.
    """
    shape = tuple(options.shape[1] for options in groups)
    if not prod(shape):
        return []
    tables = [np.ascontiguousarray(options) for options in groups] + [np.zeros((5, 1))] * (MOST_GROUPS - len(groups))
    limits = float(num_ranks), num_steps - 1.0, float(num_stages or 0), keep
    seconds, flat = _shortest(tables[0], tables[1], tables[2], *limits)
    # Which of several alike comes first must not depend on the CPU.
    seconds = decisive(seconds)
    result = []
    for index in np.argsort(seconds, kind="stable")[:keep]:
        at = zip(groups, np.unravel_index(flat[index], shape), strict=True)
        degrees = tuple((int(options[REPLICAS, i]), int(options[STAGES, i])) for options, i in at)
        result.append((float(seconds[index]), degrees))
    return result


@njit()
def _shortest(first, second, third, num_ranks, num_more_steps, num_stages, keep):  # type: ignore[no-untyped-def]
    """Seconds of the ``keep`` best points and of all that may count as equal to them, and the points' numbers, rising.

    What two groups take is a lower bound on what all three do, rounded or not.
    """
    best = np.full(keep, np.inf)
    seconds = [np.inf for _ in range(0)]
    numbers = [0 for _ in range(0)]
    for i in range(first.shape[1]):
        for j in range(second.shape[1]):
            ranks = first[0, i] + second[0, j]
            stages = first[1, i] + second[1, j]
            fill_s = first[2, i] + second[2, j]
            slowest_s = max(first[3, i], second[3, j])
            limit_s = best[keep - 1] * (1.0 + DECISIVE_SLACK)
            if ranks > num_ranks or fill_s + num_more_steps * slowest_s > limit_s:
                continue
            for k in range(third.shape[1]):
                if ranks + third[0, k] > num_ranks or (num_stages > 0 and stages + third[1, k] != num_stages):
                    continue
                point_s = (fill_s + third[2, k]) + num_more_steps * max(slowest_s, third[3, k])
                if point_s <= limit_s:
                    seconds.append(point_s)
                    numbers.append((i * second.shape[1] + j) * third.shape[1] + k)
                    limit_s = _enter(best, point_s) * (1.0 + DECISIVE_SLACK)
    return np.array(seconds), np.array(numbers)


@inlined
def _enter(best, value):  # type: ignore[no-untyped-def]
    """Put a value into its place among rising ones, of which the last falls out; returns the new last."""
    place = len(best) - 1
    while place >= 0 and best[place] > value:
        if place + 1 < len(best):
            best[place + 1] = best[place]
        best[place] = value
        place -= 1
    return best[-1]
