"""Draws of the hardware constants: factors of ``Speed`` that agree with the published runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial

import numpy as np

from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import UserError
from entrain_bench.config.constants import DIGITS, Draws
from entrain_bench.config.schema import NUM_DRAWS
from entrain_bench.lab.ledger.fit import Constant, Fit, Ledger, Point, linearize, make_points, solve
from entrain_bench.lab.ledger.kernels import Forward
from entrain_bench.lab.ledger.predict import Change, Interval
from entrain_bench.specs.cluster import Speed

# Draws that are tried for each that is accepted.
TRIES = 200
# Maximum distance of a source's level from the fit's, in standard deviations of its error.
FARTHEST = 2.0
# Devices without measurements, and the one whose draws they have.
CARRIED = {"H200-SXM": "H100-SXM", "H800-SXM": "H100-SXM", "H20-SXM": "H100-SXM", "A800-SXM-80GB": "A100-SXM-80GB"}
# Those of other generations or makers, whose draws are twice as wide in logarithms: a judgment, as no table has them.
WIDER = {"B200-SXM": "H100-SXM", "GB200": "H100-SXM", "B300-SXM": "H100-SXM"} | dict.fromkeys(
    ("L40S", "RTX-4090", "RTX-6000-Ada", "MI300X"), "A100-SXM-80GB"
)
# Factors that times tell, and the one that peaks of memory tell: spread, and correlation between devices.
TIMES = tuple(
    Constant("speed", name, 1.0, spread, shared, "")
    for name, spread, shared in (
        ("gemm", 0.15, 0.0),
        ("attention", 0.15, 0.0),
        ("memory", 0.10, 0.0),
        ("node", 0.20, 0.5),
        ("network", 0.20, 0.5),
        ("launch", 0.50, 0.8),
        ("overlap", 0.50, 0.8),
    )
)
# Factors on a device's constants by another source that contradicts them: the A40's forwards allow 0.43
# of attained arithmetic, its BERT runs ask for 0.91 (experiments/cluster/sources.csv).
OTHER_READING = {"A40": Speed(gemm=0.91 / 0.43, attention=0.91 / 0.43)}
PEAKS = (Constant("speed", "reserve", 1.0, 0.25, 0.8, ""),)


def draw_constants(ledger: Ledger, error: float) -> Draws:
    """Sets of factors by device that agree with the ledger; ``error`` of a prediction as of ``Fit``.

    Devices in ``CARRIED`` have another device's, those in ``WIDER`` the squares of its factors. ``UserError`` if
    configured constants leave the published ranges.
    """
    ranges = [_forward_point(forward) for forward in ledger.forwards]
    times = _around([*make_points(ledger.entries, partial(at_factors, TIMES)), *ranges], TIMES, error)
    peaks = make_points(ledger.entries, partial(at_factors, PEAKS), memory=True)
    memory = _around(peaks, PEAKS, error) if peaks else None
    draws = dict[str, dict[int, Speed]]()
    for device in times.problem.devices:
        factors = draw(times, device, [point for point in ranges if point.device == device])
        reserves = np.ones((NUM_DRAWS, 1))
        if memory is not None:
            # A device without measured peaks has the factors of one with them.
            known = memory.problem.devices
            reserves = draw(memory, device if device in known else known[0])
        sets = np.hstack([factors, reserves])
        draws[device] = {number: _speed([*TIMES, *PEAKS], row) for number, row in enumerate(sets, 1)}
        if device in OTHER_READING:
            draws[device] = pulled(draws[device], OTHER_READING[device])
    carried = {device: draws[other] for device, other in CARRIED.items() if other in draws}
    wider = {device: squared(draws[other]) for device, other in WIDER.items() if other in draws}
    return wider | carried | draws


def squared(draws: Mapping[int, Speed]) -> dict[int, Speed]:
    """Draws with the square of every factor, which are twice as far from 1 in logarithms."""
    return {number: drawn.times(drawn) for number, drawn in draws.items()}


def pulled(draws: Mapping[int, Speed], reading: Speed) -> dict[int, Speed]:
    """Draws that cover two readings: each moves a share, uniform in [0, 1], of its log distance to the other one.

    Only factors that ``reading`` states move, all of a draw by one share.
    """
    stated = {name: factor for name, factor in asdict(reading).items() if factor != 1.0}
    shares = np.random.default_rng(1).permutation((np.arange(len(draws)) + 0.5) / len(draws))

    def moved(drawn: Speed, share: float) -> Speed:
        between = {name: getattr(drawn, name) ** (1 - share) * factor**share for name, factor in stated.items()}
        return replace(drawn, **{name: float(f"{factor:.{DIGITS}g}") for name, factor in between.items()})

    return {number: moved(drawn, float(share)) for (number, drawn), share in zip(draws.items(), shares, strict=True)}


def at_factors(constants: Sequence[Constant], factors: FloatArray) -> Change:
    """A change of clusters: the factors of ``Speed`` that ``constants`` name."""
    return lambda cluster: cluster.at(_speed(constants, factors))


def _speed(constants: Sequence[Constant], factors: Iterable[float]) -> Speed:
    return Speed(**{constant.field: float(factor) for constant, factor in zip(constants, factors, strict=True)})


def _forward_point(forward: Forward) -> Point:
    """A range of forwards as a point: any time in it is as good, so shares of its ends hold 1."""

    def predict(factors: FloatArray) -> Interval:
        predicted_ms = forward.predicted_ms(at_factors(TIMES, factors))
        return predicted_ms / forward.most_ms, predicted_ms / forward.least_ms

    return Point(forward.where, forward.truth.cluster.device.name, 1.0, predict)


def _around(points: Sequence[Point], constants: Sequence[Constant], error: float) -> Fit:
    """Ranges of the unknown around the configured constants.

    Where these contradict a source's measurements on a device, that source does not narrow the device's constants.
    """
    problem = linearize(points, constants)
    slopes = problem.slopes.copy()
    residuals, _ = problem.linear(problem.at)
    for source, device in set(zip(problem.source_of.tolist(), problem.device_of.tolist(), strict=True)):
        rows = (problem.source_of == source) & (problem.device_of == device)
        if abs(float(np.median(residuals[rows]))) > FARTHEST * error:
            slopes[rows] = 0.0
    return replace(solve(replace(problem, slopes=slopes), error), at=np.zeros_like(problem.at))


def draw(fit: Fit, device: str, ranges: Sequence[Point] = (), count: int = NUM_DRAWS) -> FloatArray:
    """Correlated factors on the constants of a device that keep ``ranges`` ``[count, constants]``.

    A draw is also rejected if it moves the median residual of one of the device's sources too far: beyond ``FARTHEST``
    standard deviations of an error and further than the fit. ``UserError`` if fewer than one in ``TRIES`` is accepted.
    """
    problem = fit.problem
    index = problem.devices.index(device)
    size = len(problem.constants)
    part = slice(index * size, index * size + size)
    root = np.linalg.cholesky(fit.covariance[part, part])
    random = np.random.default_rng(0)
    of_device = [(problem.source_of == source) & (problem.device_of == index) for source in range(len(problem.sources))]
    groups = [rows for rows in of_device if rows.any()]

    def medians(at: FloatArray) -> FloatArray:
        residuals, _ = problem.linear(at)
        return np.abs([np.median(residuals[rows]) for rows in groups])

    limits = np.maximum(FARTHEST * fit.error, medians(fit.at))
    accepted = list[FloatArray]()
    for _ in range(TRIES * count):
        at = fit.at.copy()
        step = root @ random.standard_normal(size)
        at[index] += step
        factors = np.array([float(f"{factor:.{DIGITS}g}") for factor in np.exp(step)])
        ends = ((point.published_s, *point.predict(factors)) for point in ranges)
        if np.all(medians(at) <= limits) and all(low <= value <= high for value, low, high in ends):
            accepted.append(factors)
        if len(accepted) == count:
            return np.array(accepted)
    raise UserError(f"{device}: fewer than 1 in {TRIES} draws of constants agrees with the published ranges")
