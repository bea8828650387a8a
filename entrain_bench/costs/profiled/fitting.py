"""Non-negative least squares: fit seconds as a sum of parts, each with a factor >= 0.

Plain arithmetic in a fixed order, so the same points give the same factors on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from entrain_bench.base.arithmetic import matmul, solve
from entrain_bench.base.arrays import BoolArray, FloatArray

# Of a column's square: what columns that only repeat others are told apart by.
RIDGE = 1e-9
# Slope, relative to the seconds, below which a factor stays 0.
LEAST_SLOPE = 1e-9


def fit_factors(parts: FloatArray, seconds: Sequence[float]) -> FloatArray:
    """Return the factors >= 0 that minimize the squared relative residuals ``[parts]``.

    The active-set method of Lawson and Hanson (Solving Least Squares Problems, 1974, chapter 23). It ends, because
    every set of positive factors is left only for a better one.

    Args:
        parts: multiplier of each factor at each point ``[points, parts]``.
        seconds: positive seconds at each point ``[points]``.
    """
    relative = np.asarray(parts, np.float64) / np.asarray(seconds, np.float64)[:, None]
    scale = np.sqrt((relative * relative).sum(axis=0))
    used = np.flatnonzero(scale > 0)
    columns = relative[:, used] / scale[used]
    square = matmul(columns.T, columns) + RIDGE * np.eye(len(used))
    right = columns.sum(axis=0)
    factors = np.zeros(len(used))
    above = np.zeros(len(used), bool)
    while True:
        slope = np.where(above, -np.inf, right - matmul(square, factors))
        if above.all() or slope.max() <= LEAST_SLOPE:
            break
        above[int(np.argmax(slope))] = True
        factors = _best_above(square, right, factors, above)
    solution = np.zeros(len(scale))
    solution[used] = factors / scale[used]
    return solution


def _best_above(square: FloatArray, right: FloatArray, factors: FloatArray, above: BoolArray) -> FloatArray:
    """Return the best factors of a positive set; drop from the set those that would become negative."""
    while True:
        best = np.zeros(len(factors))
        best[above] = solve(square[np.ix_(above, above)], right[above])
        if not (best[above] <= 0).any():
            return best
        falling = np.flatnonzero(above & (best <= 0))
        steps = factors[falling] / (factors[falling] - best[falling])
        factors = factors + steps.min() * (best - factors)
        factors[falling[int(np.argmin(steps))]] = 0.0
        above &= factors > 0
