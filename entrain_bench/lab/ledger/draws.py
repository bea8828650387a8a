"""Draws of the hardware constants: factors of ``Speed`` around the configured constants that the rows permit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import UserError
from entrain_bench.config.constants import DIGITS, Draws
from entrain_bench.config.schema import NUM_DRAWS
from entrain_bench.lab.ledger.fit import Constant, Fit, Interval, Ledger, Point, linearize, make_points, solve
from entrain_bench.lab.ledger.kernels import Forward
from entrain_bench.lab.ledger.predict import Change
from entrain_bench.specs.cluster import Speed

# Draws that are tried for each that is accepted.
TRIES = 200
# A source's level may leave the fit's by so many standard deviations of its error.
FARTHEST = 2.0
# Devices without measurements, and the one whose draws they have.
CARRIED = {"H200-SXM": "H100-SXM", "H800-SXM": "H100-SXM", "H20-SXM": "H100-SXM"}


def _factor(name: str, spread: float, shared: float = 0.0) -> Constant:
    return Constant("speed", name, 1.0, spread, shared, "")


# Factors that times tell, and the one that peaks of memory tell.
TIMES = (
    _factor("gemm", 0.15),
    _factor("attention", 0.15),
    _factor("memory", 0.10),
    _factor("node", 0.20, 0.5),
    _factor("network", 0.20, 0.5),
    _factor("launch", 0.50, 0.8),
    _factor("overlap", 0.50, 0.8),
)
PEAKS = (_factor("reserve", 0.25, 0.8),)


def draw_constants(ledger: Ledger, error: float) -> Draws:
    """Sets of factors by device that agree with the ledger; ``error`` of a prediction as of ``Fit``.

    Devices in ``CARRIED`` have those of the device that they carry constants over from. ``UserError`` if the configured
    constants do not keep the published ranges.
    """
    ranges = [_forward_point(forward) for forward in ledger.forwards]
    times = _around([*make_points(ledger.entries, at_factors), *ranges], TIMES, error)
    peaks = make_points(ledger.entries, lambda factors: _at(PEAKS, factors), memory=True)
    memory = _around(peaks, PEAKS, error) if peaks else None
    draws = dict[str, dict[int, Speed]]()
    for device in times.problem.devices:
        factors = draw(times, device, [point for point in ranges if point.device == device])
        reserves = np.ones((NUM_DRAWS, 1))
        if memory is not None:
            # A device without measured peaks has the factors of one with them.
            known = memory.problem.devices
            reserves = draw(memory, device if device in known else known[0])
        sets = np.hstack([factors, reserves]).tolist()
        draws[device] = {number: _speed([*TIMES, *PEAKS], row) for number, row in enumerate(sets, 1)}
    return draws | {device: draws[other] for device, other in CARRIED.items() if other in draws and device not in draws}


def at_factors(factors: FloatArray) -> Change:
    """A change of clusters: the factors of ``TIMES``."""
    return _at(TIMES, factors)


def _at(constants: Sequence[Constant], factors: FloatArray) -> Change:
    return lambda cluster: cluster.at(_speed(constants, factors.tolist()))


def _speed(constants: Sequence[Constant], factors: Iterable[float]) -> Speed:
    return Speed(**{constant.field: factor for constant, factor in zip(constants, factors, strict=True)})


def _forward_point(forward: Forward) -> Point:
    """A range of forwards as a point: any time in it is as good, so shares of its ends hold 1."""

    def predict(factors: FloatArray) -> Interval:
        truth = replace(forward.truth, cluster=at_factors(factors)(forward.truth.cluster))
        predicted_ms = replace(forward, truth=truth).predicted_ms()
        return predicted_ms / forward.most_ms, predicted_ms / forward.least_ms

    return Point(forward.where, forward.truth.cluster.device.name, 1.0, predict)


def _around(points: Sequence[Point], constants: Sequence[Constant], error: float) -> Fit:
    """Ranges of the unknown around the configured constants.

    Where these contradict what a source has measured on a device, that source does not narrow the device's constants.
    """
    problem = linearize(points, constants)
    residuals = problem.residuals
    agree = np.ones(len(residuals), bool)
    for source, device in set(zip(problem.source_of.tolist(), problem.device_of.tolist(), strict=True)):
        rows = (problem.source_of == source) & (problem.device_of == device)
        agree[rows] = abs(float(np.median(residuals[rows]))) <= FARTHEST * error
    known = replace(problem, slopes=np.where(agree[:, None, None], problem.slopes, 0.0))
    return replace(solve(known, error), at=np.zeros_like(problem.at))


def draw(fit: Fit, device: str, ranges: Sequence[Point] = (), count: int = NUM_DRAWS) -> FloatArray:
    """Correlated factors on the constants of a device that keep ``ranges`` ``[count, constants]``.

    A draw is rejected, too, if it moves the median residual of one of the device's sources beyond ``FARTHEST``
    standard deviations of an error and further away than the fit leaves it.

    Raises:
        UserError: fewer than one in ``TRIES`` draws is accepted.
    """
    size = len(fit.problem.constants)
    first = fit.problem.devices.index(device) * size
    root = np.linalg.cholesky(fit.covariance[first : first + size, first : first + size])
    random = np.random.default_rng(0)
    is_near = _nearness(fit, device)
    accepted = list[FloatArray]()
    for _ in range(TRIES * count):
        step = root @ random.standard_normal(size)
        factors = np.array([float(f"{factor:.{DIGITS}g}") for factor in np.exp(step)])
        if is_near(step) and all(_holds(point, factors) for point in ranges):
            accepted.append(factors)
        if len(accepted) == count:
            return np.array(accepted)
    raise UserError(f"{device}: fewer than 1 in {TRIES} draws of constants agrees with the published ranges")


def _holds(point: Point, factors: FloatArray) -> bool:
    low, high = point.predict(factors)
    return low <= point.published_s <= high


def _nearness(fit: Fit, device: str) -> Callable[[FloatArray], bool]:
    """Whether a step leaves every source of the device as near as predictions of sources left out, to first order."""
    problem = fit.problem
    index = problem.devices.index(device)
    before = problem.linear(fit.at)
    of_device = [(problem.source_of == source) & (problem.device_of == index) for source in range(len(problem.sources))]
    limits = [
        (rows, max(FARTHEST * fit.error, abs(float(np.median(before[rows]))))) for rows in of_device if rows.any()
    ]

    def is_near(step: FloatArray) -> bool:
        at = fit.at.copy()
        at[index] += step
        after = problem.linear(at)
        return all(abs(float(np.median(after[rows]))) <= limit for rows, limit in limits)

    return is_near
