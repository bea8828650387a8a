"""How long something takes: repeated until its median is known well enough."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, floor, sqrt
from time import perf_counter

import numpy as np
import torch

from entrain_bench.base.arrays import FloatArray
from entrain_bench.train.measuring import Clock

# Calls before the first that counts, unless they take longer than a share of a point's time.
WARM_UPS = 3
WARM_UP_SHARE = 0.2
# Between waits for a GPU, so that it always has kernels queued, as in training.
GPU_BATCH = 5
# Half width of a 95% interval, in standard deviations.
Z = 1.96


@dataclass(frozen=True, slots=True)
class Patience:
    """Bounds of repetitions: their number, the relative half width of the median's 95% interval, and seconds."""

    least: int
    most: int
    precision: float
    point_s: float


def sample(turn: Callable[[Clock], None], device: torch.device, patience: Patience) -> FloatArray:
    """Seconds of what each turn times, a row a repetition ``[repetitions, parts]``."""
    clock = Clock(device)
    started = perf_counter()
    for _ in range(WARM_UPS):
        _run(turn, clock, 1)
        if perf_counter() - started > WARM_UP_SHARE * patience.point_s:
            break
    taken = list[FloatArray]()
    started = perf_counter()
    while True:
        taken.append(_run(turn, clock, GPU_BATCH if device.type == "cuda" else 1))
        rows = np.concatenate(taken)
        enough = len(rows) >= patience.least and precision_of(rows.sum(axis=1)) <= patience.precision
        if enough or len(rows) >= patience.most or perf_counter() - started > patience.point_s:
            return rows


def quantiles(seconds: FloatArray) -> tuple[float, ...]:
    """Tenth percentile, median and ninetieth of repetitions."""
    return tuple(float(value) for value in np.quantile(seconds, [0.1, 0.5, 0.9]))


def precision_of(seconds: FloatArray) -> float:
    """Half width of the 95% interval of the median, over the median; by order statistics, whatever the distribution."""
    ordered = np.sort(seconds, kind="stable")
    count = len(seconds)
    half = Z * sqrt(count) / 2
    low = max(0, floor(count / 2 - half))
    high = min(count - 1, ceil(count / 2 + half))
    return float((ordered[high] - ordered[low]) / 2 / np.median(ordered))


def _run(turn: Callable[[Clock], None], clock: Clock, repetitions: int) -> FloatArray:
    clock.start()
    for _ in range(repetitions):
        turn(clock)
    return clock.seconds().reshape(repetitions, -1)
