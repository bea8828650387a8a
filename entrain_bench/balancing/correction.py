"""Adaptive correction as in DFLOP (arXiv:2603.25120): penalties for shapes whose time is mispredicted.

The paper tracks, per shape, actual against predicted throughput, adds a penalty to the solver's costs where they
deviate, and stops when the mean benefit stays under the cost of tracking over I iterations. Penalty and I are open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np

from entrain_bench.base.arithmetic import matmul, solve
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.specs.parse import Count, Share, at_least

# Half octaves of length that a module may have; more than any sequence length needs.
MODULE_CLASSES = 128
# Pull of a class's last ratio on the new one, relative to the data of an average class: it decides where microbatches
# do not tell classes apart.
RIDGE = 0.01


@dataclass(frozen=True, slots=True)
class Observation:
    """One module's executed microbatches.

    Attributes:
        classes: shape classes present ``[classes]``.
        predicted_s: uncorrected prediction of what each class contributes on a stage ``[microbatches, classes]``.
        actual_s: executed time on a stage ``[microbatches]``.
        num_replicas: replicas that the microbatches are spread over, or groups of the width of each ``[microbatches]``.
    """

    classes: IntArray
    predicted_s: FloatArray
    actual_s: FloatArray
    num_replicas: int | IntArray


@dataclass(frozen=True, slots=True)
class Corrector:
    """Learned state; ``learn`` returns the next state.

    Attributes:
        tolerance: relative deviation below which a shape class is left alone.
        window: iterations I over which benefit and cost are compared.
        cost_s: seconds that tracking costs an iteration (measured: median CPU time of observing 512 samples under the
            default setting, 15 times, x86-64, 2026-11: 3.2 ms).
        smoothing: weight of a new observation in a class's running ratio of actual to predicted time.
        active: whether observations are still tracked.
        ratios: running actual / predicted time of each shape class, 1 on average over all work.
        benefits_s: |time error| that the penalties took away in past iterations, at most ``window`` of them.
    """

    tolerance: Annotated[float, at_least(0)] = 0.05
    window: Count = 8
    cost_s: Annotated[float, at_least(0)] = 3e-3
    smoothing: Share = 0.5
    active: bool = True
    ratios: Mapping[int, float] = field(default_factory=dict)
    benefits_s: tuple[float, ...] = ()

    def learn(self, seen: Sequence[Observation], ridge: float = RIDGE) -> Corrector:
        """Learn from one iteration; switches off, and penalties with it, when they did not pay over the window.

        Only errors relative to the whole iteration's count: a common factor changes no assignment. The benefit is the
        |time error| of a replica's microbatches on a stage, all modules together, that the penalties took away. The
        first iteration that observes a class cannot profit from it, so a switch needs a full window.
        """
        if not self.active:
            return self
        actual = np.concatenate([one.actual_s for one in seen])
        plain = np.concatenate([one.predicted_s.sum(axis=1) for one in seen])
        corrected = np.concatenate([matmul(one.predicted_s, self.penalties(one.classes)) for one in seen])
        if min(plain.sum(), actual.sum()) <= 0:
            return self
        share = np.concatenate([np.full(len(one.actual_s), 1 / one.num_replicas) for one in seen])
        scale = plain.sum() / actual.sum()
        benefit_s = (share * (_error(actual, plain) - _error(actual, corrected))).sum()
        benefits = (*self.benefits_s, float(benefit_s))[-self.window :]
        if len(benefits) == self.window and sum(benefits) / self.window < self.cost_s:
            return replace(self, active=False, benefits_s=benefits)
        ratios = dict(self.ratios)
        for one in seen:
            ratios |= self._fit(one, scale, ridge)
        return replace(self, ratios=ratios, benefits_s=benefits)

    def penalties(self, classes: IntArray) -> FloatArray:
        """Factor on the predicted time of each class: its running ratio; 1 within the tolerance or if switched off."""
        ratio = self._ratio(classes)
        return np.where(self.active & (np.abs(ratio - 1.0) > self.tolerance), ratio, 1.0)

    def _ratio(self, classes: IntArray) -> FloatArray:
        distinct, position = np.unique(classes, return_inverse=True)
        return np.array([self.ratios.get(int(one), 1.0) for one in distinct])[position]

    def _fit(self, one: Observation, scale: float, ridge: float) -> dict[int, float]:
        """Next ratios of a module: least squares of its microbatches' times, drawn towards the last ratios."""
        if not one.predicted_s.any():
            return {}
        ratio = self._ratio(one.classes)
        normal = matmul(one.predicted_s.T, one.predicted_s)
        pull = ridge * np.trace(normal) / len(normal) * np.eye(len(normal))
        rest = matmul(one.predicted_s.T, one.actual_s * scale - matmul(one.predicted_s, ratio))
        fitted = ratio + self.smoothing * solve(normal + pull, rest)
        # Noise may not turn a duration around.
        return dict(zip(one.classes.tolist(), np.maximum(fitted, 0.1).tolist(), strict=True))


def shape_classes(lengths: IntArray, module: int) -> IntArray:
    """Class of each sequence: its module's index and the half octave of its length."""
    # Twice the logarithm is that of the square, whose exponent counts from 1/2.
    _, exponent = np.frexp(np.maximum(lengths, 1).astype(np.float64) ** 2)
    return np.asarray(MODULE_CLASSES * module + exponent.astype(np.int64) - 1)


def _error(actual_s: FloatArray, predicted_s: FloatArray) -> FloatArray:
    """|time error| of each microbatch once both sum to the same, in seconds of the actual times."""
    return np.abs(actual_s - predicted_s * (actual_s.sum() / predicted_s.sum()))
