"""DistTrain's orchestration problem (arXiv:2408.04275, section 4): GPUs of each unit by convex optimisation.

With TP of every unit and DP of the backbone fixed, C_u the seconds per sample and w_u = DP_lm TP_u M C_u the
GPU-seconds that unit u spends on a step of the pipeline, the iteration takes (reconstructed)

    T = M C_lm + sum over u != lm of w_u / x_u  +  (BS / (DP_lm M) - 1) max over u of w_u / x_u

In v_u = 1 / x_u the objective is a sum of linear functions and their maximum, sum 1 / v_u <= N is convex and memory
bounds v_u from above: a convex program. As an epigraph it is smooth, so SLSQP finds its one minimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from scipy.optimize import Bounds, minimize

from entrain_bench.arrays import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class UnitLoad:
    """One unit of the problem.

    Attributes:
        gpu_s: GPU-seconds of one pipeline step, w_u.
        fewest: GPUs below which the unit does not exist or exceeds memory.
        most: GPUs beyond which it cannot be split.
        fills: whether its pass is part of the warm-up; the backbone's, M C_lm, does not depend on its GPUs.
    """

    gpu_s: float
    fewest: float
    most: float
    fills: bool = True


def iteration_s(loads: Sequence[UnitLoad], gpus: FloatArray, num_steps: int) -> float:
    """T without its constant M C_lm, for GPUs ``[units]``."""
    step = np.array([load.gpu_s for load in loads]) / gpus
    fill = np.array([load.fills for load in loads])
    return float(step[fill].sum() + (num_steps - 1) * step.max())


def solve(loads: Sequence[UnitLoad], num_gpus: int, num_steps: int) -> FloatArray | None:
    """GPUs of each unit, real numbers, that minimise ``iteration_s`` ``[units]``; None if nothing is feasible.

    Args:
        loads: the units.
        num_gpus: GPUs of all units together, at most.
        num_steps: pipeline steps of an iteration, BS / (DP_lm M).
    """
    fewest = np.array([load.fewest for load in loads])
    most = np.minimum([load.most for load in loads], num_gpus)
    if np.any(fewest > most) or fewest.sum() > num_gpus:
        return None
    work = np.array([load.gpu_s for load in loads])
    total = float(work.sum())
    if total <= 0 or len(loads) == 1:
        return fewest if total <= 0 else most
    fill = np.array([load.fills for load in loads], np.float64)
    # Scaled: v = N / x, times in units of the ideal step, total / N; the last variable is the slowest step.
    share = work / total
    start_x = fewest + (most - fewest) * min(1.0, (num_gpus - fewest.sum()) / max(float((most - fewest).sum()), 1e-12))
    start = num_gpus / start_x
    start = np.append(start, (share * start).max())
    steps = num_steps - 1 + 1e-6  # keeps the slowest step determined when there is one step only
    gradient = np.append(fill * share, steps) / (steps + 1)
    slack = np.hstack([-np.diag(share), np.ones((len(loads), 1))])
    constraints: list[Any] = [
        {"type": "ineq", "fun": lambda z: slack @ z, "jac": lambda _: slack},
        {
            "type": "ineq",
            "fun": lambda z: 1.0 - (1.0 / z[:-1]).sum(),
            "jac": lambda z: np.append(1.0 / z[:-1] ** 2, 0.0),
        },
    ]
    found = minimize(  # type: ignore[call-overload]  # the stubs want callables with extra arguments
        lambda z: float(gradient @ z),
        start,
        jac=lambda _: gradient,
        method="SLSQP",
        bounds=Bounds(np.append(num_gpus / most, 0.0), np.append(num_gpus / fewest, np.inf)),
        constraints=constraints,
        tol=1e-10,
    )
    solution = np.clip(num_gpus / np.maximum(found.x[:-1], 1e-12), fewest, most)
    # The solver's tolerance may leave the sum a hair above N; shrink what is above the lower bounds.
    excess = float(solution.sum() - num_gpus)
    if excess > 0:
        solution -= (solution - fewest) * min(1.0, excess / float((solution - fewest).sum()))
    best = min((solution, start_x), key=lambda gpus: iteration_s(loads, gpus, num_steps))
    return np.asarray(best)


@dataclass(frozen=True, slots=True)
class Options:
    """What a unit may be at integers, with everything else of the sub-problem fixed; arrays ``[options]``.

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
"""(DP, PP) of every unit."""


def best_integers(
    units: Sequence[Options], num_ranks: int, num_steps: int, keep: int, num_stages: int | None = None
) -> list[tuple[float, Point]]:
    """The points with the least T: one option a unit, a step through all stages and the slowest stage for the rest.

    Args:
        units: options of each unit.
        num_ranks: ranks of all units together, at most.
        num_steps: pipeline steps of an iteration.
        keep: points to return, at most.
        num_stages: stages of all units together; any if None.

    Returns:
        Seconds and point, best first.
    """
    shape = tuple(len(unit.dp) for unit in units)
    if not all(shape):
        return []
    ranks, fill, slowest, stages = (np.zeros(shape) for _ in range(4))
    for axis, unit in enumerate(units):
        along = [1] * len(units)
        along[axis] = -1
        ranks += unit.ranks.reshape(along)
        fill += unit.fill_s.reshape(along)
        stages += unit.pp.reshape(along)
        np.maximum(slowest, unit.slowest_s.reshape(along), out=slowest)
    fits = (ranks <= num_ranks) & (stages == (num_stages or stages))
    seconds = np.where(fits, fill + (num_steps - 1) * slowest, np.inf).ravel()
    found = np.argpartition(seconds, min(keep, len(seconds)) - 1)[:keep]
    result = []
    for flat in found[np.argsort(seconds[found], kind="stable")]:
        if np.isfinite(seconds[flat]):
            at = np.unravel_index(flat, shape)
            degrees = tuple((int(unit.dp[i]), int(unit.pp[i])) for unit, i in zip(units, at, strict=True))
            result.append((float(seconds[flat]), degrees))
    return result
