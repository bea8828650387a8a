"""The fit of the whole ledger: constants, sources left out, and what stays unknown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import Composer
from entrain_bench.config.constants import Draws
from entrain_bench.lab.ledger.constants import (
    FITTED,
    RESERVE,
    SPEED,
    Constant,
    at_reserve,
    at_speed,
    speed_of,
    with_constants,
    with_names,
)
from entrain_bench.lab.ledger.entries import Entry, Outcome, outcomes_of
from entrain_bench.lab.ledger.fit import Fit, Knob, Point, fit_points, left_out_fits, linearize, solve
from entrain_bench.lab.ledger.forwards import ForwardCase, read_forwards
from entrain_bench.lab.ledger.kernels import KernelRow, products_of
from entrain_bench.lab.ledger.points import forward_points, memory_points, product_points, source_of, time_points
from entrain_bench.lab.ledger.posterior import FARTHEST, NUM_DRAWS, draw
from entrain_bench.specs.cluster import ClusterSpec, Speed

# Significant digits of a fitted constant.
DIGITS = 2
# The constant that gives way where a device's fit leaves published ranges, and its values that are tried.
LIMITED = "device.sustained_fraction"
STEPS_DOWN = np.round(np.arange(1.0, 0.0, -0.01), 2)
# Devices without measurements, and the one whose constants they carry over.
CARRIED = {"H800-SXM": "H100-SXM", "H20-SXM": "H100-SXM"}


@dataclass(frozen=True, slots=True)
class Ledger:
    """Rows with their cases, published ranges of forwards, and products with the clusters whose devices they are of."""

    entries: tuple[Entry, ...]
    forwards: tuple[ForwardCase, ...] = ()
    products: tuple[tuple[KernelRow, ClusterSpec], ...] = ()


@dataclass(frozen=True, slots=True)
class Study:
    """A fit of whole runs by source.

    Attributes:
        fit: of all sources.
        without: of all sources but one, by its name.
        limits: greatest value of the constant ``LIMITED`` at which published ranges of forwards hold, by device.
    """

    constants: tuple[Constant, ...]
    fit: Fit
    without: Mapping[str, Fit]
    limits: Mapping[str, float]

    def values(self, device: str) -> dict[str, float]:
        """Fitted constants of a device by name, rounded to ``DIGITS``."""
        found = _values(self.constants, self.fit, device)
        return found | {LIMITED: self.limits[device]} if device in self.limits else found

    def left_out(self, ledger: Ledger) -> list[Outcome]:
        """Return every row's outcome under the fit without its source; rows without a prediction stay unchanged."""
        found = []
        for entry in ledger.entries:
            fit = self.without.get(source_of(entry.row.source))
            if fit is None or not entry.cases:
                found += outcomes_of([entry])
                continue
            device = entry.cases[0].cluster.device.name
            found += outcomes_of([entry], with_constants(self.constants, fit.factors(device)))
        return found


def ledger_with(entries: Iterable[Entry], composer: Composer) -> Ledger:
    """Entries with the committed ranges of forwards and single products."""
    forwards = tuple(ForwardCase.of(row, composer) for row in read_forwards())
    return Ledger(tuple(entries), forwards, products_of(composer))


def study_of(ledger: Ledger, constants: Sequence[Constant] = FITTED) -> Study:
    """Fit the constants to all timed rows and single products, and again without each source of the former."""
    chosen = tuple(constants)
    changes = partial(with_constants, chosen)
    points = [*time_points(ledger.entries, changes), *product_points(ledger.products, changes)]
    fit = fit_points(points, [constant.knob for constant in chosen])
    found = {case.truth.cluster.device.name for case in ledger.forwards}
    limits = {device: _limit(chosen, fit, device, ledger.forwards) for device in sorted(found)}
    return Study(chosen, fit, left_out_fits(fit.problem, fit.error), limits)


def _values(constants: Sequence[Constant], fit: Fit, device: str) -> dict[str, float]:
    named = zip(constants, fit.factors(device).tolist(), strict=True)
    return {each.knob.name: float(f"{each.value(factor):.{DIGITS}g}") for each, factor in named}


def _limit(constants: Sequence[Constant], fit: Fit, device: str, forwards: Sequence[ForwardCase]) -> float:
    """The greatest value of ``LIMITED`` up to the fitted one at which all ranges hold; ``UserError`` if none is."""
    fitted = _values(constants, fit, device)
    for value in STEPS_DOWN[fitted[LIMITED] >= STEPS_DOWN].tolist():
        change = with_names(fitted | {LIMITED: value})
        if all(case.row.least_ms <= case.predicted_ms(change) <= case.row.most_ms for case in forwards):
            return float(value)
    raise UserError(f"{device}: no value of {LIMITED} keeps the published ranges of forwards.csv")


def constants_table(study: Study) -> tuple[str, list[str], list[list[str]]]:
    """Title, heading and rows: fitted constants by device, and by how much the log of each is uncertain."""
    devices = study.fit.problem.devices
    spread = np.sqrt(np.diag(study.fit.covariance)).reshape(study.fit.at.shape)
    values = [study.values(device) for device in devices]
    rows = [
        [
            name,
            *(
                f"{own[name]:.{DIGITS}g} ({100 * size:.0f}%)"
                for own, size in zip(values, spread[:, index], strict=True)
            ),
        ]
        for index, name in enumerate(values[0])
    ]
    title = f"Fitted constants (standard deviation); error of a source left out: {100 * study.fit.error:.1f}%"
    return title, ["constant", *devices], rows


def posterior(ledger: Ledger, error: float) -> Draws:
    """Sets of constants around the configured ones, by device.

    Devices in ``CARRIED`` have those of the device that they carry constants over from.

    Args:
        ledger: what they must agree with.
        error: of a prediction, as of ``Fit``.

    Raises:
        UserError: the configured constants do not keep the published ranges.
    """
    ranges = forward_points(ledger.forwards, at_speed)
    times = _around([*time_points(ledger.entries, at_speed), *ranges], SPEED, error)
    peaks = memory_points(ledger.entries, at_reserve)
    memory = _around(peaks, (RESERVE,), error) if peaks else None
    found = {device: _draws(device, times, memory, ranges) for device in times.problem.devices}
    return found | {device: found[other] for device, other in CARRIED.items() if other in found}


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


def _draws(device: str, times: Fit, memory: Fit | None, ranges: Sequence[Point]) -> dict[int, Speed]:
    held = [point for point in ranges if point.device == device]

    def holds(factors: FloatArray) -> bool:
        return all(point.residual(factors) == 0.0 for point in held)

    factors = draw(times, device, holds)
    reserves = np.ones((NUM_DRAWS, 1))
    if memory is not None:
        # A device without measured peaks has the factors of one with them.
        known = memory.problem.devices
        reserves = draw(memory, device if device in known else known[0], lambda _: True)
    pairs = zip(factors, reserves[:, 0].tolist(), strict=True)
    return {number: speed_of(row, reserve) for number, (row, reserve) in enumerate(pairs, 1)}
