"""Sets of constants that the ledger permits: draws from a fit's posterior."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import UserError
from entrain_bench.lab.ledger.fit import Fit

NUM_DRAWS = 50
SEED = 0
# Draws that are tried for each that is accepted.
TRIES = 200
# Significant digits of a factor.
DIGITS = 4
# A source's level may leave the fit's by so many standard deviations of its error.
FARTHEST = 2.0


def draw(
    fit: Fit, device: str, accepts: Callable[[FloatArray], bool], count: int = NUM_DRAWS, seed: int = SEED
) -> FloatArray:
    """Factors on the fitted constants of a device, correlated, each set accepted by ``accepts`` ``[count, knobs]``.

    A draw is rejected, too, if it moves the median residual of one of the device's sources beyond ``FARTHEST``
    standard deviations of an error and further away than the fit leaves it.

    Raises:
        UserError: fewer than one in ``TRIES`` draws is accepted.
    """
    knobs = len(fit.problem.knobs)
    first = fit.problem.devices.index(device) * knobs
    block = fit.covariance[first : first + knobs, first : first + knobs]
    root = np.linalg.cholesky(block)
    random = np.random.default_rng(seed)
    found: list[FloatArray] = []
    for _ in range(TRIES * count):
        step = root @ random.standard_normal(knobs)
        factors = np.array([float(f"{factor:.{DIGITS}g}") for factor in np.exp(step)])
        if _near(fit, device, step) and accepts(factors):
            found.append(factors)
        if len(found) == count:
            return np.array(found)
    raise UserError(f"{device}: fewer than 1 in {TRIES} draws of constants agrees with the published ranges")


def _near(fit: Fit, device: str, step: FloatArray) -> bool:
    """Whether every source of the device stays as near as predictions of sources left out are, to first order."""
    problem = fit.problem
    index = fit.problem.devices.index(device)
    at = fit.at.copy()
    at[index] += step
    before = problem.linear(fit.at)
    after = problem.linear(at)
    for source in range(len(problem.sources)):
        rows = (problem.source_of == source) & (problem.device_of == index)
        if rows.any():
            level = abs(float(np.median(after[rows])))
            if level > max(FARTHEST * fit.error, abs(float(np.median(before[rows])))):
                return False
    return True
