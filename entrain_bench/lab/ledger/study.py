"""The fit of the whole ledger: constants of whole runs, and sources left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from statistics import median
from typing import Any

import numpy as np

from entrain_bench.base.arrays import FloatArray
from entrain_bench.config.compose import Composer
from entrain_bench.lab.ledger.fit import Constant, Fit, Interval, Point, fit_points, left_out_fits
from entrain_bench.lab.ledger.jobs import OK
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
    Table,
    predict_entries,
    remember_predictions,
)
from entrain_bench.specs.cluster import ClusterSpec

DEVICE, NODE, NETWORK = PLACES = ("device", "node", "network")
# Significant digits of a fitted constant.
DIGITS = 2
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
# Constants that kernels alone decide: what is known of them before is nearly nothing.
OF_KERNELS = {
    PRODUCT: (Constant(DEVICE, "gemm_half_flops", 2.5e9, 1.0, 0.0, "small products are slow"),),
    ATTENTION: (
        Constant(DEVICE, "attention_half_tokens", 280.0, 1.0, 0.0, "short sequences are slow"),
        Constant(DEVICE, "attention_half_head_dim", 44.0, 1.0, 0.0, "narrow heads are slow"),
    ),
}


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


def make_points(entries: Iterable[Entry], changes: Changes) -> list[Point]:
    """The measured iterations as points of a fit; what a row leaves open makes its prediction a range."""
    predictors = dict[bytes, Callable[[Case], Prediction]]()

    def point(entry: Entry, published_s: float) -> Point:
        def predict(factors: FloatArray) -> Interval:
            content = factors.tobytes()
            if content not in predictors:
                predictors[content] = remember_predictions(changes(factors))
            seconds = entry.outcome(predictors[content]).seconds
            assert seconds is not None
            return seconds.low, seconds.high

        return Point(entry.row.source, entry.cases[0].cluster.device.name, published_s, predict)

    measured = ((entry, entry.row.published_s) for entry in entries)
    return [point(entry, value) for entry, value in measured if entry.cases and entry.row.outcome == OK and value]


@dataclass(frozen=True, slots=True)
class Ledger:
    """Rows with their cases, published ranges of forwards, and products with the clusters whose devices they are of."""

    entries: tuple[Entry, ...]
    forwards: tuple[Forward, ...] = ()
    products: tuple[tuple[KernelRow, ClusterSpec], ...] = ()


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fit of whole runs: of all sources, and without each of them by its name."""

    constants: tuple[Constant, ...]
    fit: Fit
    without: Mapping[str, Fit]

    def values(self, device: str) -> dict[str, float]:
        """Fitted constants of a device by name, rounded to ``DIGITS``."""
        named = zip(self.constants, self.fit.factors(device).tolist(), strict=True)
        return {constant.name: float(f"{constant.value(factor):.{DIGITS}g}") for constant, factor in named}

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


def fit_ledger(ledger: Ledger, constants: Sequence[Constant] = FITTED) -> Calibration:
    """Fit the constants to all timed rows and single products, and again without each source of the former."""
    chosen = tuple(constants)
    changes = partial(with_constants, chosen)
    points = make_points(ledger.entries, changes)
    for row, cluster in ledger.products:
        points.append(row.point(cluster, changes))
    fit = fit_points(points, chosen)
    return Calibration(chosen, fit, left_out_fits(fit.problem, fit.error))


def constants_table(study: Calibration) -> Table:
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
        fit = fit_points(points, constants, iterations=4)
        factors = fit.factors(clusters[device].device.name).tolist()
        values = [f"{one.field} {one.value(factor):.2g}" for one, factor in zip(constants, factors, strict=True)]
        errors = [abs(row.ratio(clusters[device]) - 1.0) for row in of_kind]
        shown = [f"{100 * median(errors):.0f}%", f"{100 * max(errors):.0f}%", ", ".join(values)]
        rows.append([f"{device}, {kind}", str(len(errors)), *shown])
    return "Kernels", ["kernels", "number", "median error", "largest error", "fitted"], rows


def expectations_table(constants: Sequence[Constant]) -> Table:
    """The expectations of constants before a fit."""
    rows = [[each.name, f"{each.usual:g}", f"{100 * each.spread:.0f}%", each.why] for each in constants]
    return "What is expected before a fit", ["constant", "median", "standard deviation", "why"], rows
