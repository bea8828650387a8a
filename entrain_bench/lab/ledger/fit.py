"""Fit constants to measured times: least squares in logs, with an error of its own for every source.

The model of a row i of source s is ``log predicted_i(x) - log published_i = offset_s + error_i``. The unknowns x are
logs of factors on constants, one set for each device, with a normal prior around 0 (the usual value). All rows of a
source share its offset, so a source of 400 rows fixes the level of predictions hardly better than one of 10. Offset and
error have the same standard deviation: half of a row's variance is its source's. A source counts at most ``MAX_ROWS``
rows. The size of the errors is estimated leave-one-source-out. Sources of kernels have a known error, and no offset.

If a prediction is an interval, its error is the distance of the published time from the interval, 0 inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from entrain_bench.base.arrays import BoolArray, FloatArray, IntArray
from entrain_bench.base.errors import require
from entrain_bench.config.compose import Composer
from entrain_bench.lab.ledger.jobs import OK
from entrain_bench.lab.ledger.kernels import ATTENTION, PRODUCT, Forward, KernelRow, plan_forwards, read_kernels
from entrain_bench.lab.ledger.predict import Case, Change, Entry, Interval, Prediction, predictor
from entrain_bench.specs.cluster import ClusterSpec

# Rows that a source counts at most: within a source, errors are not independent.
MAX_ROWS = 20
# Step of a difference quotient in logs, and largest step of an iteration.
DIFFERENCE = 0.02
MAX_STEP = 0.5
STEPS = 3
# Steps in which rows outside their intervals are found. Then the log of a distance to the nearest end: a row further
# inside is not differentiated, because no step moves its ends that far.
ACTIVE_STEPS = 10
FAR_INSIDE = 0.1
# Number of times that all points are predicted again around the solution.
ITERATIONS = 2
# Residuals beyond this number of standard deviations count linearly (Huber).
HUBER = 2.0
# Standard deviation of a row that a fit starts from, and the least, in logs: no source is exact.
FIRST_ERROR = 0.1
LEAST_ERROR = 0.02
# Share of a row's variance that is its source's.
OF_SOURCE = 0.5
# A median distance times this is a normal's standard deviation.
NORMAL = 1.4826


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant that is fitted, as a factor on its usual value.

    Attributes:
        place: ``device``, or all tiers inside (``node``) or between nodes (``network``).
        field: of ``DeviceSpec`` or ``LinkTier``.
        usual: median of the prior, in the field's unit.
        spread: standard deviation of the log of the factor in the prior.
        shared: correlation of these logs between devices, in [0, 1): 0 for a property of a chip.
        why: the reason for the prior.
    """

    place: str
    field: str
    usual: float
    spread: float
    shared: float
    why: str

    def value(self, factor: float) -> float:
        """Return the constant at a factor on its usual value; a fraction is at most 1."""
        value = self.usual * factor
        return min(value, 1.0) if self.field.endswith(("efficiency", "fraction", "cost")) else value


@dataclass(frozen=True, slots=True)
class Point:
    """A measured time and its prediction.

    Attributes:
        predict: least and greatest predicted seconds under factors ``[constants]``.
        error: standard deviation of the log, for sources without an offset; NaN: the leave-one-source-out error.
    """

    source: str
    device: str
    published_s: float
    predict: Callable[[FloatArray], Interval]
    error: float = np.nan


@dataclass(frozen=True, slots=True)
class Problem:
    """Points, constants, and the prior of all unknowns.

    Attributes:
        errors: known standard deviations of sources; NaN: the leave-one-source-out error ``[sources]``.
        at: logs of factors around which ``slopes`` hold ``[devices, constants]``.
        distances: there, logs of least and greatest predicted over published seconds ``[points, 2]``.
        slopes: derivatives of the distances by the logs of the point's device ``[points, 2, constants]``.
    """

    constants: tuple[Constant, ...]
    devices: tuple[str, ...]
    sources: tuple[str, ...]
    source_of: IntArray
    device_of: IntArray
    errors: FloatArray
    at: FloatArray
    distances: FloatArray
    slopes: FloatArray

    @property
    def prior(self) -> FloatArray:
        """Covariance of all unknowns before a fit ``[devices x constants] * 2``."""
        variance = np.array([one.spread**2 for one in self.constants])
        shared = variance * [one.shared for one in self.constants]
        count = len(self.devices)
        return np.kron(np.ones((count, count)), np.diag(shared)) + np.kron(np.eye(count), np.diag(variance - shared))

    def linear(self, at: FloatArray) -> tuple[FloatArray, FloatArray]:
        """To first order at other factors: logs of predicted over published ``[points]``, 0 inside intervals.

        Second: their derivatives by all unknowns ``[points, devices x constants]``.
        """
        steps = (at - self.at)[self.device_of]
        low, high = (self.distances + (self.slopes * steps[:, None, :]).sum(axis=2)).T
        above = low > 0
        nearest = np.where(above[:, None], self.slopes[:, 0], self.slopes[:, 1])
        design = np.zeros((len(low), *at.shape))
        design[np.arange(len(low)), self.device_of] = np.where((above | (high <= 0))[:, None], nearest, 0.0)
        return np.where(above, low, np.minimum(high, 0.0)), design.reshape(len(low), -1)


@dataclass(frozen=True, slots=True)
class Fit:
    """The result of a fit: constants and their uncertainty.

    Attributes:
        at: logs of factors ``[devices, constants]``.
        covariance: of ``at``, flattened (Laplace's approximation) ``[devices x constants] * 2``.
        error: standard deviation of the log of a prediction for a source that was not fitted to.
    """

    problem: Problem
    at: FloatArray
    covariance: FloatArray
    error: float

    def factors(self, device: str) -> FloatArray:
        """Factors of a device ``[constants]``."""
        return np.asarray(np.exp(self.at[self.problem.devices.index(device)]))


def linearize(points: Sequence[Point], constants: Sequence[Constant], at: FloatArray | None = None) -> Problem:
    """Predict every point at ``at`` (default: the configured constants) and once more for every constant.

    ``UserError`` if there are no points.
    """
    require(len(points) > 0, "ledger", 0, "at least one row with a time that can be predicted")
    devices = tuple(dict.fromkeys(point.device for point in points))
    errors = {point.source: point.error for point in points}
    sources = tuple(errors)
    where = np.zeros((len(devices), len(constants))) if at is None else at
    device_of = np.array([devices.index(point.device) for point in points])
    source_of = np.array([sources.index(point.source) for point in points])
    distances = np.zeros((len(points), 2))
    slopes = np.zeros((len(points), 2, len(constants)))
    for row, (point, device) in enumerate(zip(points, device_of.tolist(), strict=True)):
        middle = point.predict(np.exp(where[device]))
        distances[row] = np.log(middle) - np.log(point.published_s)
        if distances[row, 0] < -FAR_INSIDE and distances[row, 1] > FAR_INSIDE:
            continue
        for index in range(len(constants)):
            moved = where[device].copy()
            moved[index] += DIFFERENCE
            slopes[row, :, index] = np.log(np.divide(point.predict(np.exp(moved)), middle)) / DIFFERENCE
    known = np.array([*errors.values()])
    return Problem(tuple(constants), devices, sources, source_of, device_of, known, where, distances, slopes)


def solve(problem: Problem, error: float | None = None, left_out: str | None = None) -> Fit:
    """Fit the linearized problem, without one source if it is named; the error is estimated unless given.

    The step is limited to ``MAX_STEP`` in every unknown, because the problem is linear nearby only.
    """
    use = np.array([problem.sources[source] != left_out for source in problem.source_of])
    if error is not None:
        return _step(problem, use, error)
    fit = _step(problem, use, FIRST_ERROR)
    for _ in range(STEPS):
        fit = _step(problem, use, _error(problem, fit))
    return fit


def left_out_fits(problem: Problem, error: float) -> dict[str, Fit]:
    """Return leave-one-source-out fits by source, except sources with a known error."""
    unknown = [name for name, known in zip(problem.sources, problem.errors, strict=True) if np.isnan(known)]
    return {name: solve(problem, error, name) for name in unknown}


def fit_points(
    points: Sequence[Point], constants: Sequence[Constant], error: float | None = None, iterations: int = ITERATIONS
) -> Fit:
    """Fit by Gauss and Newton: predict all points ``1 + constants`` times in each of the iterations.

    ``error`` as of ``solve``; a single source cannot determine it.
    """
    fit = solve(linearize(points, constants), error)
    for _ in range(iterations - 1):
        fit = solve(linearize(points, constants, fit.at), error)
    return fit


def _step(problem: Problem, use: BoolArray, error: float) -> Fit:
    """Return the best unknowns of the linear problem for a given error; Huber weights are of the last step."""
    prior = problem.prior
    errors = np.where(np.isnan(problem.errors), error, problem.errors)
    kept = np.ones(len(problem.source_of))
    at = problem.at
    covariance = prior
    for _ in range(ACTIVE_STEPS):
        residuals, design = problem.linear(at)
        # The prior holds for the logs themselves, so residuals are taken back to logs of 0.
        target = design @ at.ravel() - residuals
        information = np.linalg.inv(prior)
        score = np.zeros(design.shape[1])
        for source in np.unique(problem.source_of[use]).tolist():
            rows = np.flatnonzero(use & (problem.source_of == source))
            of_source = OF_SOURCE if np.isnan(problem.errors[source]) else 0.0
            size = float(errors[source])
            variance = (1.0 - of_source) * size**2 * max(1.0, len(rows) / MAX_ROWS) / kept[rows]
            weighted = design[rows] / variance[:, None]
            ones = 1.0 / variance
            shared = of_source * size**2 / (1.0 + of_source * size**2 * ones.sum())
            information += weighted.T @ design[rows] - shared * np.outer(weighted.sum(axis=0), weighted.sum(axis=0))
            score += weighted.T @ target[rows] - shared * weighted.sum(axis=0) * (ones @ target[rows])
        covariance = np.linalg.inv(information)
        best = (covariance @ score).reshape(problem.at.shape)
        at = problem.at + np.clip(best - problem.at, -MAX_STEP, MAX_STEP)
        # Huber's weights of rows by their distance from their source's median.
        residuals, _ = problem.linear(at)
        middle = np.array([np.median(residuals[problem.source_of == index]) for index in range(len(errors))])
        limit = HUBER * errors[problem.source_of]
        kept = limit / np.maximum(np.abs(residuals - middle[problem.source_of]), limit)
    return Fit(problem, at, (covariance + covariance.T) / 2, error)


def _error(problem: Problem, fit: Fit) -> float:
    """Return the leave-one-source-out standard deviation of a row, with equal weight for every source."""
    sizes = []
    for index in np.flatnonzero(np.isnan(problem.errors)).tolist():
        rows = problem.source_of == index
        residuals, _ = problem.linear(_step(problem, ~rows, fit.error).at)
        sizes.append(NORMAL * float(np.median(np.abs(residuals[rows]))))
    return max(float(np.sqrt(np.mean(np.square(sizes)))), LEAST_ERROR) if sizes else LEAST_ERROR


DEVICE, NODE, NETWORK = PLACES = ("device", "node", "network")
# Standard deviation of the log of a kernel's time: of the published rates around the fitted ones.
KERNEL_ERROR = 0.1
type Changes = Callable[[FloatArray], Change]


FITTED: tuple[Constant, ...] = (
    Constant(DEVICE, "sustained_fraction", 0.75, 0.4, 0.0, "boards throttle under load; between a half and all"),
    Constant(DEVICE, "gemm_half_width", 300.0, 0.8, 0.8, "products with one side of a few hundred lose up to a half"),
    Constant(DEVICE, "elementwise_efficiency", 0.9, 0.15, 0.5, "dropout and softmax compute as they move data"),
    Constant(DEVICE, "overlap_cost", 0.3, 0.7, 0.8, "NCCL takes up to 16 of 108 or 132 multiprocessors, and bandwidth"),
    Constant(DEVICE, "host_launch_s", 6e-6, 0.5, 0.8, "eager PyTorch issues a kernel in 4 to 12 us"),
    Constant(NODE, "collective_efficiency", 0.8, 0.2, 0.5, "nccl-tests reach 0.8 to 0.95 with large messages"),
    Constant(NODE, "collective_start_s", 20e-6, 0.6, 0.8, "nccl-tests: 10 to 40 us for small messages"),
    Constant(NETWORK, "collective_efficiency", 0.7, 0.8, 0.5, "nccl-tests: 0.6 to 0.95, by fabric"),
)
# Constants that only kernels decide, with nearly flat priors.
OF_KERNELS = {
    PRODUCT: (Constant(DEVICE, "gemm_half_flops", 2.5e9, 1.0, 0.0, "small products are slow"),),
    ATTENTION: (
        Constant(DEVICE, "attention_half_tokens", 280.0, 1.0, 0.0, "short sequences are slow"),
        Constant(DEVICE, "attention_half_head_dim", 44.0, 1.0, 0.0, "narrow heads are slow"),
    ),
}


def with_constants(constants: Sequence[Constant], factors: FloatArray) -> Change:
    """Return a change of clusters: constants at factors on their usual values."""
    values: dict[str, dict[str, Any]] = {place: {} for place in PLACES}
    for constant, factor in zip(constants, factors.tolist(), strict=True):
        values[constant.place][constant.field] = constant.value(factor)

    def change(cluster: ClusterSpec) -> ClusterSpec:
        size = cluster.gpus_per_node
        tiers = (replace(tier, **values[NODE if tier.num_ranks <= size else NETWORK]) for tier in cluster.tiers)
        return replace(cluster, device=replace(cluster.device, **values[DEVICE]), tiers=tuple(tiers))

    return change


def make_points(entries: Iterable[Entry], changes: Changes, memory: bool = False) -> list[Point]:
    """The measured iterations, or peaks of memory, as points of a fit; open values of a row give a range."""

    @cache
    def predict_at(factors: bytes) -> Callable[[Case], Prediction]:
        return predictor(changes(np.frombuffer(factors)))

    def predict(entry: Entry, factors: FloatArray) -> Interval:
        outcome = entry.outcome(predict_at(factors.tobytes()))
        return outcome.gib if memory else outcome.seconds

    return [
        Point(entry.row.source, entry.cases[0].cluster.device.name, value, partial(predict, entry))
        for entry in entries
        if entry.fitted and entry.row.outcome == OK
        if (value := entry.row.peak_memory_gib if memory else entry.row.published_s)
    ]


def kernel_point(row: KernelRow, changes: Changes) -> Point:
    """A kernel as a point of a fit, on a cluster that factors change; the error of its rate is given."""

    def predict(factors: FloatArray) -> Interval:
        return (row.predicted_s(changes(factors)),) * 2

    return Point(row.where, row.cluster.device.name, row.published_s, predict, KERNEL_ERROR)


@dataclass(frozen=True, slots=True)
class Ledger:
    """Rows with their cases, published ranges of forwards, and single kernels."""

    entries: tuple[Entry, ...]
    forwards: tuple[Forward, ...] = ()
    kernels: tuple[KernelRow, ...] = ()


def complete_ledger(entries: Iterable[Entry], composer: Composer) -> Ledger:
    """Entries with the committed ranges of forwards and single kernels."""
    return Ledger(tuple(entries), tuple(plan_forwards(composer)), read_kernels(composer))


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fit of whole runs: of all sources, and leave-one-source-out by name."""

    fit: Fit
    without: Mapping[str, Fit]

    def left_out(self, ledger: Ledger) -> list[dict[str, Any]]:
        """Return every row's line under the fit without its source; rows without a prediction stay unchanged."""

        @cache
        def predict_without(source: str, device: str) -> Callable[[Case], Prediction]:
            fit = self.without.get(source)
            return predictor(with_constants(fit.problem.constants, fit.factors(device)) if fit else None)

        devices = [entry.cases[0].cluster.device.name if entry.cases else "" for entry in ledger.entries]
        pairs = zip(ledger.entries, devices, strict=True)
        return [entry.line(predict_without(entry.row.source if device else "", device)) for entry, device in pairs]


def fit_ledger(ledger: Ledger, constants: Sequence[Constant] = FITTED) -> Calibration:
    """Fit the constants to all timed rows and single products; fit again leave-one-source-out over the rows."""
    changes = partial(with_constants, constants)
    points = make_points(ledger.entries, changes)
    points += [kernel_point(row, changes) for row in ledger.kernels if row.kind == PRODUCT]
    fit = fit_points(points, constants)
    return Calibration(fit, left_out_fits(fit.problem, fit.error))
