"""DFLOP's adaptive correction (arXiv:2603.25120): penalties for shapes whose time is mispredicted.

The paper tracks, per shape, actual against predicted throughput, adds a penalty to the solver's costs where they
deviate, and stops when the mean benefit stays under the cost of tracking over I iterations. Penalty and I are open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from entrain_bench.arrays import FloatArray, IntArray
from entrain_bench.errors import require


@dataclass(frozen=True, slots=True)
class Corrector:
    """What was learnt so far; ``observe`` and ``end_iteration`` return the next state.

    Attributes:
        tolerance: relative deviation below which a shape class is left alone.
        window: iterations I over which benefit and cost are compared.
        cost_s: seconds that tracking costs an iteration.
        smoothing: weight of a new observation in a class's running ratio of actual to predicted time.
        active: whether observations are still tracked.
        ratios: running actual / predicted time of each shape class.
        benefit_s: |time error| that the penalties took away in the current iteration.
        benefits_s: the same for past iterations, at most ``window`` of them.
    """

    tolerance: float = 0.05
    window: int = 8
    cost_s: float = 1e-3
    smoothing: float = 0.5
    active: bool = True
    ratios: Mapping[int, float] = field(default_factory=dict)
    benefit_s: float = 0.0
    benefits_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        where = "strategy.assigner.correction"
        require(self.tolerance >= 0, f"{where}.tolerance", self.tolerance, "at least 0")
        require(self.window >= 1, f"{where}.window", self.window, "at least 1")
        require(self.cost_s >= 0, f"{where}.cost_s", self.cost_s, "at least 0")
        require(0 < self.smoothing <= 1, f"{where}.smoothing", self.smoothing, "in (0, 1]")

    def observe(self, shape_class: int, predicted_s: float, actual_s: float) -> Corrector:
        """Learn from the uncorrected prediction and the actual time of a shape; nothing once switched off."""
        if not self.active or predicted_s <= 0:
            return self
        corrected = predicted_s * self.penalty(shape_class)
        benefit = abs(actual_s - predicted_s) - abs(actual_s - corrected)
        seen = actual_s / predicted_s
        old = self.ratios.get(shape_class, seen)
        ratio = old + self.smoothing * (seen - old)
        return replace(self, ratios={**self.ratios, shape_class: ratio}, benefit_s=self.benefit_s + benefit)

    def end_iteration(self) -> Corrector:
        """Close an iteration; switches tracking off, and penalties with it, when they did not pay over the window.

        The first iteration that observes a class cannot profit from it, so a switch needs a full window.
        """
        if not self.active:
            return self
        benefits = (*self.benefits_s, self.benefit_s)[-self.window :]
        pays = len(benefits) < self.window or sum(benefits) / self.window >= self.cost_s
        return replace(self, active=pays, benefit_s=0.0, benefits_s=benefits)

    def penalty(self, shape_class: int) -> float:
        """Factor on the predicted time of a class: its running ratio, 1 within the tolerance or when switched off."""
        ratio = self.ratios.get(shape_class, 1.0)
        return ratio if self.active and abs(ratio - 1.0) > self.tolerance else 1.0

    def penalties(self, classes: IntArray) -> FloatArray:
        """Factor for each of many shapes, same shape as ``classes``."""
        if not self.ratios or not self.active:
            return np.ones(len(classes))
        distinct, position = np.unique(classes, return_inverse=True)
        return np.array([self.penalty(int(c)) for c in distinct])[position]


def shape_classes(lengths: IntArray, is_encoder: bool) -> IntArray:
    """Class of each sequence: its module's role and the half octave of its length."""
    octave = np.floor(2 * np.log2(np.maximum(lengths, 1))).astype(np.int64)
    return np.asarray(2 * octave + int(is_encoder))
