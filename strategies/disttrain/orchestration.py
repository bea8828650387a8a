"""DistTrain's orchestration problem (arXiv:2408.04275, section 4): GPUs of each group of modules, a convex program.

TP of every group and DP of the backbone are fixed. C_u are seconds per sample, and w_u = DP_lm TP_u M C_u are
GPU-seconds of a pipeline step. The time is T = M C_lm + sum over u != lm of w_u / x_u + (BS / (DP_lm M) - 1) max over u
of w_u / x_u (reconstructed). For a fixed slowest step, every group gets enough GPUs for that step. The other GPUs go
where they shorten the warm-up most: x_u = y sqrt(w_u), one y for all, as far as bounds allow. The slowest step is
bisected to the last bits, by the sign of the derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from entrain_bench.base.arithmetic import DECISIVE_BITS, decisive
from entrain_bench.base.arrays import BoolArray, FloatArray
from entrain_bench.base.compiled import njit

# Halvings of an interval, until no number lies between its ends.
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
    """Return T without its constant M C_lm for GPUs ``[problems, groups]``; NaN for NaN ``[problems]``."""
    step = loads.gpu_s / gpus
    return np.asarray(step[:, loads.fills].sum(axis=1) + (num_steps - 1) * step.max(axis=1))


def solve(loads: GroupLoads, num_gpus: int, num_steps: int) -> FloatArray:
    """Return GPUs of each group, real numbers, that minimize ``iteration_s`` ``[problems, groups]``; NaN if too few."""
    most = np.minimum(loads.most, float(num_gpus))
    feasible = np.all(loads.fewest <= most, axis=1) & (loads.fewest.sum(axis=1) <= num_gpus)
    gpus = np.full(loads.gpu_s.shape, np.nan)
    work, fewest, most = (column[feasible] for column in (loads.gpu_s, loads.fewest, most))
    warms = loads.fills.astype(np.float64)
    gpus[feasible] = _bisect_steps(work, fewest, most, warms, float(num_gpus), num_steps - 1.0)
    return gpus


@njit()
def _bisect_steps(work, fewest, most, warms, num_gpus, num_more_steps):  # type: ignore[no-untyped-def]
    """The GPUs of least T; arguments as in ``GroupLoads``, ``warms`` 1.0 for groups that fill."""
    gpus = np.empty_like(work)
    for problem in range(len(work)):
        limits = fewest[problem], most[problem], num_gpus
        gpus[problem] = _bisect_step(work[problem], warms, limits, num_more_steps)
    return gpus


@njit()
def _bisect_step(work, warms, limits, num_more_steps):  # type: ignore[no-untyped-def]
    fewest, most, num_gpus = limits
    weight = warms * np.sqrt(work)
    # The slowest step lies between its values with the most and with the fewest GPUs of a group.
    low = (work / most).max()
    high = (work / fewest).max()
    for _ in range(HALVINGS):
        before = (low, high)
        step = low + (high - low) / 2
        least = np.maximum(fewest, work / step) if step > 0.0 else fewest
        root, gpus = _share_out(weight, least, most, num_gpus)
        # Seconds of warm-up saved per second of a longer step; infinite with too few GPUs.
        saved = np.inf if root == 0.0 else 0.0
        for group in range(len(work)):
            if root > 0.0 and least[group] > fewest[group]:
                saved += max(0.0, (gpus[group] / root) ** 2 / work[group] - warms[group])
        if saved > num_more_steps:
            low = step
        else:
            high = step
        if before == (low, high):
            break  # Every further turn would be like this one.
    return _share_out(weight, np.maximum(fewest, work / high) if high > 0.0 else fewest, most, num_gpus)[1]


@njit()
def _share_out(weight, least, most, num_gpus):  # type: ignore[no-untyped-def]
    """Return the root y and its GPUs; 0 with fewer GPUs than ``least``, infinite if all groups have their most."""
    last = 0.0
    high = 0.0
    for group in range(len(weight)):
        if weight[group] > 0.0:
            high = max(high, most[group] / weight[group])
            for root in (least[group] / weight[group], most[group] / weight[group]):
                if root >= last and _given(weight, least, most, root).sum() <= num_gpus:
                    last = root
    if last == high:
        return np.inf, _given(weight, least, most, high)
    if last > 0.0:
        slope = 0.0
        for group in range(len(weight)):
            if weight[group] > 0.0 and least[group] / weight[group] <= last < most[group] / weight[group]:
                slope += weight[group]
        # Rounding may carry a least past its most, and the root with it: nothing can grow then.
        if slope > 0.0:
            last += (num_gpus - _given(weight, least, most, last).sum()) / slope
    return last, _given(weight, least, most, last)


@njit()
def _given(weight, least, most, root):  # type: ignore[no-untyped-def]
    """Return the GPUs of each group for a root y, within bounds."""
    return np.minimum(np.maximum(least, root * weight), most)


def undominated(options: FloatArray) -> FloatArray:
    """Return a group's options that no other option equals or beats in ranks, fill and slowest stage.

    An option is its GPUs, PP, seconds of a step through all stages and at the slowest stage, and DP ``[5, options]``.
    """
    ranks, _, fill_s, slowest_s, _ = options
    kept: list[int] = []
    for index in np.lexsort((slowest_s, fill_s, ranks)).tolist():
        if not np.any((fill_s[kept] <= fill_s[index]) & (slowest_s[kept] <= slowest_s[index])):
            kept.append(index)
    return options[:, kept]


type Point = tuple[tuple[int, int], ...]
"""(DP, PP) of every group."""


def best_integers(
    groups: Sequence[FloatArray], num_ranks: int, num_steps: int, keep: int, num_stages: int | None = None
) -> list[tuple[float, Point]]:
    """The ``keep`` points with the least T and their seconds, best first; of equal points those of earlier options.

    Each of at most three groups takes an option; together ``num_ranks`` at most, and ``num_stages`` if given.
    """
    shape = tuple(options.shape[1] for options in groups)
    if not prod(shape):
        return []
    tables = [np.ascontiguousarray(options) for options in groups] + [np.zeros((5, 1))] * (MOST_GROUPS - len(groups))
    limits = float(num_ranks), num_steps - 1.0, float(num_stages or 0), keep
    seconds, flat = _shortest(tables[0], tables[1], tables[2], *limits)
    # The order of equal options must not depend on the CPU.
    seconds = decisive(seconds)
    result = []
    for index in np.argsort(seconds, kind="stable")[:keep]:
        at = zip(groups, np.unravel_index(flat[index], shape), strict=True)
        degrees = tuple((int(options[4, i]), int(options[1, i])) for options, i in at)
        result.append((float(seconds[index]), degrees))
    return result


@njit()
def _shortest(first, second, third, num_ranks, num_more_steps, num_stages, keep):  # type: ignore[no-untyped-def]
    """Return seconds and ascending numbers of the ``keep`` best points and of all equal ones up to rounding."""
    best = np.full(keep, np.inf)
    seconds = [np.inf for _ in range(0)]
    numbers = [0 for _ in range(0)]
    for i in range(first.shape[1]):
        for j in range(second.shape[1]):
            ranks = first[0, i] + second[0, j]
            stages = first[1, i] + second[1, j]
            fill_s = first[2, i] + second[2, j]
            slowest_s = max(first[3, i], second[3, j])
            limit_s = best[-1] * (1.0 + DECISIVE_SLACK)
            if ranks > num_ranks or fill_s + num_more_steps * slowest_s > limit_s:
                continue
            for k in range(third.shape[1]):
                if ranks + third[0, k] > num_ranks or (num_stages > 0 and stages + third[1, k] != num_stages):
                    continue
                point_s = (fill_s + third[2, k]) + num_more_steps * max(slowest_s, third[3, k])
                if point_s <= limit_s:
                    seconds.append(point_s)
                    numbers.append((i * second.shape[1] + j) * third.shape[1] + k)
                    if point_s < best[-1]:
                        best[-1] = point_s
                        best.sort()
                        limit_s = best[-1] * (1.0 + DECISIVE_SLACK)
    return np.array(seconds), np.array(numbers)
