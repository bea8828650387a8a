"""DistTrain's orchestration problem (arXiv:2408.04275, section 4): GPUs of each group of modules, a convex program.

With TP of every group and DP of the backbone fixed, C_u the seconds per sample and w_u = DP_lm TP_u M C_u the
GPU-seconds that group u spends on a step of the pipeline, the iteration takes (reconstructed)

    T = M C_lm + sum over u != lm of w_u / x_u  +  (BS / (DP_lm M) - 1) max over u of w_u / x_u

In v_u = 1 / x_u the objective is a sum of linear functions and their maximum, sum 1 / v_u <= N is convex and memory
bounds v_u from above: a convex program. With the slowest step fixed, every group gets what keeps it within that step,
and the rest of the GPUs goes where it shortens the warm-up most: x_u = y sqrt(w_u), one y for all, as far as bounds
allow. Both y and the slowest step, by the sign of the derivative, are bisected to the last bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numba import njit

from entrain_bench.arithmetic import decisive
from entrain_bench.arrays import FloatArray, IntArray

# Of an interval, until no number lies between its ends.
HALVINGS = 100


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """One group of the problem.

    Attributes:
        gpu_s: GPU-seconds of one pipeline step, w_u.
        fewest: GPUs below which the group does not exist or exceeds memory.
        most: GPUs beyond which it cannot be split.
        fills: whether its pass is part of the warm-up; the backbone's, M C_lm, does not depend on its GPUs.
    """

    gpu_s: float
    fewest: float
    most: float
    fills: bool = True


def iteration_s(loads: Sequence[GroupLoad], gpus: FloatArray, num_steps: int) -> float:
    """T without its constant M C_lm, for GPUs ``[groups]``."""
    step = np.array([load.gpu_s for load in loads]) / gpus
    fill = np.array([load.fills for load in loads])
    return float(step[fill].sum() + (num_steps - 1) * step.max())


def solve(loads: Sequence[GroupLoad], num_gpus: int, num_steps: int) -> FloatArray | None:
    """GPUs of each group, real numbers, that minimise ``iteration_s`` ``[groups]``; None if nothing is feasible.

    Args:
        loads: the groups.
        num_gpus: GPUs of all groups together, at most.
        num_steps: pipeline steps of an iteration, BS / (DP_lm M).
    """
    columns = [(load.gpu_s, load.fills, load.fewest, min(load.most, num_gpus)) for load in loads]
    work, warms, fewest, most = np.array(columns, np.float64).T.copy()
    if np.any(fewest > most) or fewest.sum() > num_gpus:
        return None
    return np.asarray(_bisect_step(work, warms, fewest, most, float(num_gpus), num_steps - 1.0))


@njit(cache=True)
def _bisect_step(work, warms, fewest, most, num_gpus, num_more_steps):  # type: ignore[no-untyped-def]
    """The GPUs of least T; arguments ``[groups]`` as in ``GroupLoad``, ``warms`` 1.0 for groups that fill."""
    # The slowest step lies between what it is with all the GPUs a group may have and with the fewest.
    low, high = np.max(work / most), np.max(work / fewest)
    for _ in range(HALVINGS):
        step = low + (high - low) / 2
        least = fewest.copy() if step == 0.0 else np.maximum(fewest, work / step)
        gpus, root = _share_out(work, warms, least, most, num_gpus)
        # What a longer step saves of the warm-up, per second of it; without limit where there are too few GPUs.
        saved = np.inf if root == 0.0 else 0.0
        for group in range(len(work)):
            if root > 0.0 and least[group] > fewest[group]:
                saved += max(0.0, (gpus[group] / root) ** 2 / work[group] - warms[group])
        if saved > num_more_steps:
            low = step
        else:
            high = step
    least = fewest.copy() if high == 0.0 else np.maximum(fewest, work / high)
    return _share_out(work, warms, least, most, num_gpus)[0]


@njit(cache=True)
def _share_out(work, warms, least, most, num_gpus):  # type: ignore[no-untyped-def]
    """GPUs of the shortest warm-up, at least ``least``, and the root y; 0 if not even those are there.

    Infinite y: there is more of everything than groups may have.
    """
    weight = warms * np.sqrt(work)
    low, high = 0.0, 0.0
    for group in range(len(work)):
        if weight[group] > 0.0:
            high = max(high, most[group] / weight[group])
    if np.sum(np.minimum(np.maximum(least, high * weight), most)) <= num_gpus:
        return np.minimum(np.maximum(least, high * weight), most), np.inf
    for _ in range(HALVINGS):
        root = low + (high - low) / 2
        if np.sum(np.minimum(np.maximum(least, root * weight), most)) <= num_gpus:
            low = root
        else:
            high = root
    return np.minimum(np.maximum(least, low * weight), most), low


@dataclass(frozen=True, slots=True)
class Options:
    """What a group may be at integers, with everything else of the sub-problem fixed; arrays ``[options]``.

    Attributes:
        dp, pp: degrees.
        ranks: GPUs.
        fill_s: seconds of a step through all its stages.
        slowest_s: seconds of a step at its slowest stage.
    """

    dp: IntArray
    pp: IntArray
    ranks: IntArray
    fill_s: FloatArray
    slowest_s: FloatArray

    def take(self, chosen: IntArray) -> Options:
        """The chosen options."""
        return Options(*(getattr(self, f.name)[chosen] for f in fields(self)))

    def undominated(self) -> Options:
        """Without those that another one betters or equals in ranks, fill and slowest stage."""
        kept: list[int] = []
        for index in np.lexsort((self.slowest_s, self.fill_s, self.ranks)).tolist():
            worse = (self.fill_s[kept] <= self.fill_s[index]) & (self.slowest_s[kept] <= self.slowest_s[index])
            if not worse.any():
                kept.append(index)
        return self.take(np.array(kept, np.int64))


type Point = tuple[tuple[int, int], ...]
"""(DP, PP) of every group."""


def best_integers(
    groups: Sequence[Options], num_ranks: int, num_steps: int, keep: int, num_stages: int | None = None
) -> list[tuple[float, Point]]:
    """The points with the least T: one option a group, a step through all stages and the slowest stage for the rest.

    Args:
        groups: options of each group.
        num_ranks: ranks of all groups together, at most.
        num_steps: pipeline steps of an iteration.
        keep: points to return, at most.
        num_stages: stages of all groups together; any if None.

    Returns:
        Seconds and point, best first.
    """
    shape = tuple(len(group.dp) for group in groups)
    if not all(shape):
        return []
    ranks, fill, slowest, stages = (np.zeros(shape) for _ in range(4))
    for axis, group in enumerate(groups):
        along = [1] * len(groups)
        along[axis] = -1
        ranks += group.ranks.reshape(along)
        fill += group.fill_s.reshape(along)
        stages += group.pp.reshape(along)
        np.maximum(slowest, group.slowest_s.reshape(along), out=slowest)
    fits = (ranks <= num_ranks) & (stages == (num_stages or stages))
    seconds = np.where(fits, fill + (num_steps - 1) * slowest, np.inf).ravel()
    # Sorting a few of them is faster than all; which of several alike comes first must not depend on the CPU.
    seconds = decisive(seconds)
    found = np.flatnonzero(seconds <= np.partition(seconds, min(keep, len(seconds)) - 1)[min(keep, len(seconds)) - 1])
    result = []
    for flat in found[np.argsort(seconds[found], kind="stable")][:keep]:
        if np.isfinite(seconds[flat]):
            at = np.unravel_index(flat, shape)
            degrees = tuple((int(group.dp[i]), int(group.pp[i])) for group, i in zip(groups, at, strict=True))
            result.append((float(seconds[flat]), degrees))
    return result
