"""Least squares over published times, predicted again and again: the program stays, constants of the device change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from scipy.optimize import least_squares

from entrain_bench.base.arrays import FloatArray
from entrain_bench.config.compose import Composer
from entrain_bench.costs.truth import CostTruth
from entrain_bench.lab.calibration.anchors import Anchor, ForwardAnchor
from entrain_bench.lab.fidelity.programs import first_program
from entrain_bench.program import Program
from entrain_bench.simulate import Simulator
from entrain_bench.specs.cluster import DeviceSpec

# What is fitted to what, and where the search begins: products, attention, iterations, ranges of forwards (which tell
# no more apart).
PRODUCTS = {"gemm_half_flops": 5e9}
ATTENTION = {"attention_half_tokens": 300.0, "attention_half_head_dim": 44.0}
ITERATIONS = {"sustained_fraction": 0.85}
FORWARDS = {"sustained_fraction": 0.35}
# Constants below it are fractions, which stay at or below it.
MOST = 1.0
# Relative step of a derivative.
DIFFERENCE = 1e-3
DIGITS = 2


def fit_device(
    device: DeviceSpec, ratios: Sequence[Callable[[DeviceSpec], float]], start: dict[str, float]
) -> DeviceSpec:
    """Return the device whose ratios of predicted to published time have the least squared errors.

    ``start`` has the constants that are fitted and where the search begins; they get ``DIGITS`` significant digits.
    """
    names, at = [*start], np.array([*start.values()])

    def with_constants(scales: FloatArray) -> DeviceSpec:
        values: dict[str, Any] = dict(zip(names, (at * scales).tolist(), strict=True))
        return replace(device, **values)

    def residuals(scales: FloatArray) -> FloatArray:
        tried = with_constants(scales)
        return np.array([ratio(tried) - 1.0 for ratio in ratios])

    bounds = (0.01, np.where(at < MOST, MOST / at, np.inf))
    found = with_constants(least_squares(residuals, np.ones(len(at)), bounds=bounds, diff_step=[DIFFERENCE]).x)
    values: dict[str, Any] = {name: float(f"{getattr(found, name):.{DIGITS - 1}e}") for name in names}
    return replace(found, **values)


def interval(points: Sequence[ForwardPoint], device: DeviceSpec, name: str, values: FloatArray) -> tuple[float, float]:
    """Least and greatest of the tried values of a constant at which every prediction lies in its published range."""
    devices: dict[float, DeviceSpec] = {value: replace(device, **{name: value}) for value in values.tolist()}
    good = [value for value, tried in devices.items() if all(point.inside(tried) for point in points)]
    return (min(good), max(good)) if good else (np.nan, np.nan)


@dataclass(frozen=True, slots=True)
class ReferencePoint[Published: (Anchor, ForwardAnchor)]:
    """A published time, its program, and the cost model that its configuration describes."""

    anchor: Published
    truth: CostTruth
    program: Program

    @classmethod
    def of(cls, anchor: Published, composer: Composer) -> Self:
        """Plan the layout of an anchor and build its program."""
        setting, program = first_program(composer.run(anchor.overrides))
        return cls(anchor, setting.truth, program)

    def on(self, device: DeviceSpec) -> CostTruth:
        """Return the cost model of another device."""
        return replace(self.truth, cluster=replace(self.truth.cluster, device=device))


@dataclass(frozen=True, slots=True)
class IterationPoint(ReferencePoint[Anchor]):
    """A published iteration time."""

    def ratio(self, device: DeviceSpec) -> float:
        """Predicted over published."""
        simulator = Simulator(self.on(device), np.inf)
        return simulator.execute(self.program).iteration_time_s / self.anchor.published_s


@dataclass(frozen=True, slots=True)
class ForwardPoint(ReferencePoint[ForwardAnchor]):
    """A published range of a module's forwards."""

    def predicted_ms(self, device: DeviceSpec) -> float:
        """Mean over the microbatches."""
        index = [module.name for module in self.truth.model.modules].index(self.anchor.module)
        module, placed = self.truth.model.modules[index], self.program.layout.modules[index]
        times = self.on(device).chunk_times(module, placed, self.program.shapes, self.program.chunks[index])
        return 1e3 * float((times.forward_s + times.forward_comm_s).sum(axis=1).mean())

    def ratio(self, device: DeviceSpec) -> float:
        """Predicted over the middle of the range."""
        low, high = self.anchor.published_ms
        return self.predicted_ms(device) / ((low + high) / 2)

    def inside(self, device: DeviceSpec) -> bool:
        """Whether the prediction lies in the range."""
        low, high = self.anchor.published_ms
        return low <= self.predicted_ms(device) <= high
