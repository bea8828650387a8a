"""Least squares over published times: the constants of a device that no datasheet states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from scipy.optimize import least_squares

from entrain_bench.base.arrays import FloatArray
from entrain_bench.lab.calibration.points import ForwardPoint
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


class Ratio(Protocol):
    """Something published that a device predicts."""

    def ratio(self, device: DeviceSpec) -> float:
        """Predicted over published."""
        ...


def fit_device(device: DeviceSpec, points: Sequence[Ratio], start: dict[str, float]) -> DeviceSpec:
    """The device that predicts the points, all of it, best by the squares of their relative errors.

    ``start`` has the constants that are fitted and where the search begins; they get ``DIGITS`` significant digits.
    """
    names, at = [*start], np.array([*start.values()])

    def with_constants(scales: FloatArray) -> DeviceSpec:
        values: dict[str, Any] = dict(zip(names, (at * scales).tolist(), strict=True))
        return replace(device, **values)

    def residuals(scales: FloatArray) -> FloatArray:
        tried = with_constants(scales)
        return np.array([point.ratio(tried) - 1.0 for point in points])

    bounds = (0.01, np.where(at < MOST, MOST / at, np.inf))
    found = with_constants(least_squares(residuals, np.ones(len(at)), bounds=bounds, diff_step=[DIFFERENCE]).x)
    values: dict[str, Any] = {name: rounded(getattr(found, name)) for name in names}
    return replace(found, **values)


def rounded(value: float) -> float:
    """A number to ``DIGITS`` significant digits."""
    return float(f"{value:.{DIGITS - 1}e}")


def interval(points: Sequence[ForwardPoint], device: DeviceSpec, name: str, values: FloatArray) -> tuple[float, float]:
    """Least and greatest of the tried values of a constant at which every prediction lies in its published range."""
    good = []
    for value in values.tolist():
        changed: dict[str, Any] = {name: value}
        if all(point.inside(replace(device, **changed)) for point in points):
            good.append(value)
    return (min(good), max(good)) if good else (np.nan, np.nan)
