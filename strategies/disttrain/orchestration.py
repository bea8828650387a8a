"""DistTrain's orchestration problem (arXiv:2408.04275, section 4): GPUs of each unit by convex optimisation.

With TP of every unit and DP of the backbone fixed, C_u the seconds per sample and w_u = DP_lm TP_u M C_u the
GPU-seconds that unit u spends on a step of the pipeline, the iteration takes (reconstructed)

    T = M C_lm + sum over u != lm of w_u / x_u  +  (BS / (DP_lm M) - 1) max over u of w_u / x_u

In v_u = 1 / x_u the objective is a sum of linear functions and their maximum, sum 1 / v_u <= N is convex and memory
bounds v_u from above: a convex program. As an epigraph it is smooth, so SLSQP finds its one minimum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, minimize

from entrain_bench.arrays import FloatArray


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


type Point = tuple[tuple[int, int], ...]
"""(DP, PP) of every unit."""


def local_search(
    starts: Iterable[Point], estimate: Callable[[Point], float], dps: Sequence[Sequence[int]]
) -> dict[Point, float]:
    """Descend from every start over neighbouring (DP, PP) of one unit, or of two at once.

    A neighbour has one stage more or less, or the next larger or smaller DP.

    Args:
        starts: points to start from.
        estimate: seconds of a point, infinite if infeasible.
        dps: DP that each unit may have, rising.

    Returns:
        All feasible points looked at and their seconds.
    """
    seen: dict[Point, float] = {}

    def look(point: Point) -> float:
        if point not in seen:
            seen[point] = estimate(point)
        return seen[point]

    for start in starts:
        current = start
        while True:
            best = min(_neighbours(current, dps), key=look, default=current)
            if look(best) >= look(current):
                break
            current = best
    return {point: seconds for point, seconds in seen.items() if np.isfinite(seconds)}


def _neighbours(point: Point, dps: Sequence[Sequence[int]]) -> Iterator[Point]:
    moves: list[list[tuple[int, int]]] = []
    for (dp, pp), allowed in zip(point, dps, strict=True):
        at = allowed.index(dp)
        near = [allowed[i] for i in (at - 1, at + 1) if 0 <= i < len(allowed)]
        moves.append([(dp, p) for p in (pp - 1, pp + 1) if p >= 1] + [(other, pp) for other in near])
    for unit, options in enumerate(moves):
        for move in options:
            yield (*point[:unit], move, *point[unit + 1 :])
            for second in range(unit + 1, len(point)):
                for answer in moves[second]:
                    yield (*point[:unit], move, *point[unit + 1 : second], answer, *point[second + 1 :])
