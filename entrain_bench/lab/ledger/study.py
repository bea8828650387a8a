"""The fit of the whole ledger: constants of whole runs, sources left out, and what stays unknown.

A constant's value is a factor on what is usual. What is not known of the constants once they are in the YAMLs is a
posterior: draws of factors of ``Speed`` around the configured constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from statistics import median
from typing import Any

import numpy as np

from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import Composer
from entrain_bench.config.constants import Draws
from entrain_bench.config.schema import NUM_DRAWS
from entrain_bench.lab.ledger.fit import Fit, Interval, Knob, Point, fit_points, left_out_fits, linearize, solve
from entrain_bench.lab.ledger.kernels import (
    ATTENTION,
    PRODUCT,
    Forward,
    KernelRow,
    compose_devices,
    plan_forwards,
    read_kernels,
)
from entrain_bench.lab.ledger.predict import (
    Case,
    Change,
    Entry,
    Outcome,
    Prediction,
    predict_entries,
    remember_predictions,
)
from entrain_bench.lab.ledger.rows import OK
from entrain_bench.lab.ledger.tables import Table
from entrain_bench.specs.cluster import ClusterSpec, Speed

DEVICE, NODE, NETWORK = PLACES = ("device", "node", "network")
# No efficiency or share exceeds it.
MOST = 1.0
# Significant digits of a fitted constant, and of a drawn factor.
DIGITS = 2
DRAWN_DIGITS = 4
SEED = 0
# Draws that are tried for each that is accepted.
TRIES = 200
# A source's level may leave the fit's by so many standard deviations of its error.
FARTHEST = 2.0
# Devices without measurements, and the one whose draws they have.
CARRIED = {"H200-SXM": "H100-SXM", "H800-SXM": "H100-SXM", "H20-SXM": "H100-SXM"}

type Changes = Callable[[FloatArray], Change]


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant that is fitted.

    Attributes:
        place: ``device``, or all tiers inside (``node``) or between nodes (``network``).
        field: of ``DeviceSpec`` or ``LinkTier``.
        usual: median of what is expected before anything is fitted, in the field's unit.
        spread, shared: as of ``Knob``.
        why: what the expectation rests on.
    """

    place: str
    field: str
    usual: float
    spread: float
    shared: float
    why: str

    @property
    def knob(self) -> Knob:
        """Itself as an unknown of a fit."""
        return Knob(f"{self.place}.{self.field}", self.spread, self.shared)

    def value(self, factor: float) -> float:
        """The constant at a factor on what is usual; a fraction of something is at most 1."""
        value = self.usual * factor
        return min(value, MOST) if self.field.endswith(("efficiency", "fraction", "cost")) else value


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
# Constants that kernels alone decide: what is known of them before is nearly nothing.
OF_KERNELS = {
    PRODUCT: (Constant(DEVICE, "gemm_half_flops", 2.5e9, 1.0, 0.0, "small products are slow"),),
    ATTENTION: (
        Constant(DEVICE, "attention_half_tokens", 280.0, 1.0, 0.0, "short sequences are slow"),
        Constant(DEVICE, "attention_half_head_dim", 44.0, 1.0, 0.0, "narrow heads are slow"),
    ),
}
# Factors of ``Speed`` that times and that peaks of memory tell.
SPEED: tuple[Knob, ...] = (
    Knob("gemm", 0.15),
    Knob("attention", 0.15),
    Knob("memory", 0.10),
    Knob("node", 0.20, 0.5),
    Knob("network", 0.20, 0.5),
    Knob("launch", 0.50, 0.8),
    Knob("overlap", 0.50, 0.8),
)
RESERVE = Knob("reserve", 0.25, 0.8)


def with_constants(constants: Sequence[Constant], factors: FloatArray) -> Change:
    """A change of clusters: constants at factors on what is usual."""
    values: dict[str, dict[str, Any]] = {place: {} for place in PLACES}
    for constant, factor in zip(constants, factors.tolist(), strict=True):
        values[constant.place][constant.field] = constant.value(factor)

    def change(cluster: ClusterSpec) -> ClusterSpec:
        size = cluster.gpus_per_node
        tiers = (replace(tier, **values[NODE if tier.num_ranks <= size else NETWORK]) for tier in cluster.tiers)
        return replace(cluster, device=replace(cluster.device, **values[DEVICE]), tiers=tuple(tiers))

    return change


def make_speed(factors: FloatArray, reserve: float = 1.0) -> Speed:
    """Factors on ``SPEED`` as a ``Speed``; its fields are all fitted, or this fails."""
    values = dict(zip((knob.name for knob in SPEED), factors.tolist(), strict=True)) | {RESERVE.name: reserve}
    return Speed(**{field.name: values[field.name] for field in fields(Speed)})


def at_speed(factors: FloatArray) -> Change:
    """A change of clusters: factors on ``SPEED``."""
    return lambda cluster: cluster.at(make_speed(factors))


def at_reserve(factors: FloatArray) -> Change:
    """A change of clusters: a factor on ``RESERVE``."""
    return lambda cluster: cluster.at(Speed(reserve=float(factors[0])))


def make_points(entries: Iterable[Entry], changes: Changes, memory: bool = False) -> list[Point]:
    """The measured iterations, or peaks of memory in GiB, as points of a fit.

    What a row leaves open makes its prediction a range.
    """
    predictors = dict[bytes, Callable[[Case], Prediction]]()

    def point(entry: Entry, published: float) -> Point:
        def predict(factors: FloatArray) -> Interval:
            content = factors.tobytes()
            if content not in predictors:
                predictors[content] = remember_predictions(changes(factors))
            outcome = entry.outcome(predictors[content])
            ends = outcome.gib if memory else outcome.seconds
            assert ends is not None
            return ends.low, ends.high

        return Point(entry.row.source, entry.cases[0].cluster.device.name, (published, published), predict)

    measured = ((entry, entry.row.peak_memory_gib if memory else entry.row.published_s) for entry in entries)
    return [point(entry, value) for entry, value in measured if entry.cases and entry.row.outcome == OK and value]


@dataclass(frozen=True, slots=True)
class Ledger:
    """Rows with their cases, published ranges of forwards, and products with the clusters whose devices they are of."""

    entries: tuple[Entry, ...]
    forwards: tuple[Forward, ...] = ()
    products: tuple[tuple[KernelRow, ClusterSpec], ...] = ()


@dataclass(frozen=True, slots=True)
class Study:
    """A fit of whole runs by source.

    Attributes:
        fit: of all sources.
        without: of all sources but one, by its name.
    """

    constants: tuple[Constant, ...]
    fit: Fit
    without: Mapping[str, Fit]

    def values(self, device: str) -> dict[str, float]:
        """Fitted constants of a device by name, rounded to ``DIGITS``."""
        named = zip(self.constants, self.fit.factors(device).tolist(), strict=True)
        return {constant.knob.name: float(f"{constant.value(factor):.{DIGITS}g}") for constant, factor in named}

    def left_out(self, ledger: Ledger) -> list[Outcome]:
        """Return every row's outcome under the fit without its source; rows without a prediction stay unchanged."""
        outcomes = list[Outcome]()
        for entry in ledger.entries:
            fit = self.without.get(entry.row.source)
            change = None
            if fit is not None and entry.cases:
                change = with_constants(self.constants, fit.factors(entry.cases[0].cluster.device.name))
            outcomes += predict_entries([entry], change)
        return outcomes


def complete_ledger(entries: Iterable[Entry], composer: Composer) -> Ledger:
    """Entries with the committed ranges of forwards and single products."""
    products = [row for row in read_kernels() if row.kind == PRODUCT]
    clusters = compose_devices((row.device for row in products), composer)
    pairs = ((row, clusters[row.device]) for row in products)
    return Ledger(tuple(entries), tuple(plan_forwards(composer)), tuple(pairs))


def fit_ledger(ledger: Ledger, constants: Sequence[Constant] = FITTED) -> Study:
    """Fit the constants to all timed rows and single products, and again without each source of the former."""
    chosen = tuple(constants)
    changes = partial(with_constants, chosen)
    points = make_points(ledger.entries, changes)
    for row, cluster in ledger.products:
        points.append(row.point(cluster, changes))
    fit = fit_points(points, [constant.knob for constant in chosen])
    return Study(chosen, fit, left_out_fits(fit.problem, fit.error))


def constants_table(study: Study) -> Table:
    """Fitted constants by device, and by how much the log of each is uncertain."""
    devices = study.fit.problem.devices
    spread = np.sqrt(np.diag(study.fit.covariance)).reshape(study.fit.at.shape)
    values = [study.values(device) for device in devices]
    rows = []
    for index, name in enumerate(values[0]):
        of_devices = zip(values, spread[:, index].tolist(), strict=True)
        rows.append([name, *(f"{known[name]:.{DIGITS}g} ({100 * size:.0f}%)" for known, size in of_devices)])
    title = f"Fitted constants (standard deviation); error of a source left out: {100 * study.fit.error:.1f}%"
    return title, ["constant", *devices], rows


def fitted_kernels_table(composer: Composer) -> Table:
    """Constants fitted to each device's kernels, and errors of the committed constants."""
    kernels = read_kernels()
    clusters = compose_devices((row.device for row in kernels), composer)
    rows = []
    for (device, kind), group in groupby(kernels, key=attrgetter("device", "kind")):
        of_kind = [*group]
        constants = OF_KERNELS[kind]
        points = [row.point(clusters[device], partial(with_constants, constants)) for row in of_kind]
        fit = fit_points(points, [constant.knob for constant in constants], iterations=4)
        factors = fit.factors(clusters[device].device.name).tolist()
        values = [f"{one.field} {one.value(factor):.2g}" for one, factor in zip(constants, factors, strict=True)]
        errors = [abs(row.ratio(clusters[device]) - 1.0) for row in of_kind]
        shown = [f"{100 * median(errors):.0f}%", f"{100 * max(errors):.0f}%", ", ".join(values)]
        rows.append([f"{device}, {kind}", str(len(errors)), *shown])
    return "Kernels", ["kernels", "number", "median error", "largest error", "fitted"], rows


def expectations_table(constants: Sequence[Constant]) -> Table:
    """The expectations of constants before a fit."""
    rows = [[each.knob.name, f"{each.usual:g}", f"{100 * each.spread:.0f}%", each.why] for each in constants]
    return "What is expected before a fit", ["constant", "median", "standard deviation", "why"], rows


def posterior(ledger: Ledger, error: float) -> Draws:
    """Sets of constants around the configured ones, by device.

    Devices in ``CARRIED`` have those of the device that they carry constants over from.

    Args:
        ledger: what they must agree with.
        error: of a prediction, as of ``Fit``.

    Raises:
        UserError: the configured constants do not keep the published ranges.
    """
    ranges = [case.point(at_speed) for case in ledger.forwards]
    times = _around([*make_points(ledger.entries, at_speed), *ranges], SPEED, error)
    peaks = make_points(ledger.entries, at_reserve, memory=True)
    memory = _around(peaks, (RESERVE,), error) if peaks else None
    draws = dict[str, dict[int, Speed]]()
    for device in times.problem.devices:
        held = [point for point in ranges if point.device == device]
        factors = draw(times, device, lambda factors: all(point.residual(factors) == 0.0 for point in held))  # noqa: B023
        reserves = np.ones((NUM_DRAWS, 1))
        if memory is not None:
            # A device without measured peaks has the factors of one with them.
            known = memory.problem.devices
            reserves = draw(memory, device if device in known else known[0], lambda _: True)
        pairs = zip(factors, reserves[:, 0].tolist(), strict=True)
        draws[device] = {number: make_speed(row, reserve) for number, (row, reserve) in enumerate(pairs, 1)}
    return draws | {device: draws[other] for device, other in CARRIED.items() if other in draws and device not in draws}


def _around(points: Sequence[Point], knobs: Sequence[Knob], error: float) -> Fit:
    """Ranges of the unknown around the configured constants.

    Where these contradict what a source has measured on a device, that source does not narrow the device's constants.
    """
    problem = linearize(points, knobs)
    residuals = problem.residuals
    agree = np.ones(len(residuals), bool)
    for source, device in set(zip(problem.source_of.tolist(), problem.device_of.tolist(), strict=True)):
        rows = (problem.source_of == source) & (problem.device_of == device)
        agree[rows] = abs(float(np.median(residuals[rows]))) <= FARTHEST * error
    known = replace(problem, slopes=np.where(agree[:, None, None], problem.slopes, 0.0))
    return replace(solve(known, error), at=np.zeros_like(problem.at))


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
    root = np.linalg.cholesky(fit.covariance[first : first + knobs, first : first + knobs])
    random = np.random.default_rng(seed)
    accepted = list[FloatArray]()
    for _ in range(TRIES * count):
        step = root @ random.standard_normal(knobs)
        factors = np.array([float(f"{factor:.{DRAWN_DIGITS}g}") for factor in np.exp(step)])
        if _is_near(fit, device, step) and accepts(factors):
            accepted.append(factors)
        if len(accepted) == count:
            return np.array(accepted)
    raise UserError(f"{device}: fewer than 1 in {TRIES} draws of constants agrees with the published ranges")


def _is_near(fit: Fit, device: str, step: FloatArray) -> bool:
    """Whether every source of the device stays as near as predictions of sources left out are, to first order."""
    problem = fit.problem
    index = problem.devices.index(device)
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
