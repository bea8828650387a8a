"""Least squares over published times: the constants of a device that no datasheet states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from entrain_bench.base.arithmetic import matmul, solve
from entrain_bench.base.arrays import FloatArray
from entrain_bench.lab.calibration.cases import ForwardCase
from entrain_bench.specs.cluster import DeviceSpec

# What is fitted to what, and where the search begins: products, attention, iterations, ranges of forwards (which tell
# no more apart).
PRODUCTS = {"gemm_half_flops": 5e9}
ATTENTION = {"attention_half_tokens": 300.0, "attention_half_head_dim": 44.0}
ITERATIONS = {"sustained_fraction": 0.85}
FORWARDS = {"sustained_fraction": 0.35}
MOST = 1.0
MAX_STEPS = 30
# Step of a derivative, and the relative gain at which the search ends.
DIFFERENCE, ENOUGH = 1e-3, 1e-6
# Damping at first, and its factor after a good and after a bad step.
DAMPING, EASIER, HARDER = 1e-3, 0.3, 10.0
DIGITS = 2

type Residuals = Callable[[FloatArray], FloatArray]


class Ratio(Protocol):
    """Something published that a device predicts."""

    def ratio(self, device: DeviceSpec) -> float:
        """Predicted over published."""
        ...


def fit_device(device: DeviceSpec, cases: Sequence[Ratio], start: dict[str, float]) -> DeviceSpec:
    """The device that predicts the cases best, by the squares of their relative errors.

    Args:
        device: what is not fitted.
        cases: of that device.
        start: the constants that are fitted, and where the search begins.

    Returns:
        The device with fitted constants, rounded to ``DIGITS`` significant digits.
    """

    def residuals(scales: FloatArray) -> FloatArray:
        tried = with_constants(device, start, scales)
        return np.array([case.ratio(tried) - 1.0 for case in cases])

    most = np.array([MOST / value if value < MOST else np.inf for value in start.values()])
    found = with_constants(device, start, least_squares(residuals, np.ones(len(start)), most))
    values: dict[str, Any] = {name: rounded(getattr(found, name)) for name in start}
    return replace(found, **values)


def with_constants(device: DeviceSpec, start: dict[str, float], scales: FloatArray) -> DeviceSpec:
    """The device with each constant at a multiple of where its search began."""
    values: dict[str, Any] = {name: at * float(scale) for (name, at), scale in zip(start.items(), scales, strict=True)}
    return replace(device, **values)


def least_squares(residuals: Residuals, start: FloatArray, most: FloatArray) -> FloatArray:
    """Positive numbers of least squared residuals, at most ``most``: Levenberg-Marquardt with one-sided differences.

    Args:
        residuals: of the numbers.
        start: where the search begins ``[numbers]``.
        most: upper bounds ``[numbers]``.
    """
    best, damping = start, DAMPING
    errors = residuals(best)
    for _ in range(MAX_STEPS):
        slopes = np.stack([(residuals(best + move) - errors) / DIFFERENCE for move in DIFFERENCE * np.eye(len(best))])
        square = matmul(slopes, slopes.T)
        downhill = -matmul(slopes, errors)
        for _ in range(MAX_STEPS):
            step = solve(square + damping * np.diag(np.diag(square) + ENOUGH), downhill)
            tried = np.clip(best + step, 0.01 * start, most)
            after = residuals(tried)
            if (after**2).sum() < (errors**2).sum():
                break
            damping *= HARDER
        else:
            return best
        gain = 1.0 - float((after**2).sum() / (errors**2).sum())
        best, errors, damping = tried, after, damping * EASIER
        if gain < ENOUGH:
            break
    return best


def rounded(value: float) -> float:
    """A number to ``DIGITS`` significant digits."""
    return float(f"{value:.{DIGITS - 1}e}")


def interval(cases: Sequence[ForwardCase], device: DeviceSpec, name: str, values: FloatArray) -> tuple[float, float]:
    """Least and greatest of the tried values of a constant at which every prediction lies in its published range."""
    good = []
    for value in values.tolist():
        changed: dict[str, Any] = {name: value}
        if all(case.inside(replace(device, **changed)) for case in cases):
            good.append(value)
    return (min(good), max(good)) if good else (np.nan, np.nan)
