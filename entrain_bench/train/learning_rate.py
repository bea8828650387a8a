"""The learning rate of every iteration: linear warm-up, then constant, or down along a line or half a cosine."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi

from entrain_bench.base.errors import require, unknown_choice

DECAYS = ("constant", "linear", "cosine")


@dataclass(frozen=True, slots=True)
class LearningRate:
    """A schedule over iterations.

    It rises in equal steps to ``peak``, which the last of the warm-up has, then decays until ``last_iteration``, which
    has ``least``. A decay along half a cosine is that of arXiv:1608.03983, equation 5, without restarts.
    """

    peak: float
    least: float
    warmup_iterations: int
    decay: str
    last_iteration: int

    def at(self, iteration: int) -> float:
        """The rate of an iteration, counted from 0."""
        if iteration < self.warmup_iterations:
            return self.peak * (iteration + 1) / self.warmup_iterations
        if self.decay == "constant":
            return self.peak
        top = max(self.warmup_iterations - 1, 0)
        done = min(1.0, (iteration - top) / max(1, self.last_iteration - top))
        left = 1.0 - done if self.decay == "linear" else (1.0 + cos(pi * done)) / 2
        return self.least + (self.peak - self.least) * left


def check_learning_rate(peak: float, least: float, warmup_iterations: int, decay: str, iterations: int) -> None:
    """Raise ``UserError`` for settings of ``harness=train`` that make no schedule."""
    require(peak >= 0, "harness.learning_rate", peak, "at least 0")
    require(0 <= least <= peak, "harness.min_learning_rate", least, f"from 0 to learning_rate={peak}")
    require(warmup_iterations >= 0, "harness.warmup_iterations", warmup_iterations, "at least 0")
    if decay not in DECAYS:
        raise unknown_choice("harness.learning_rate_decay", decay, DECAYS)
    fits = iterations == 0 or iterations > warmup_iterations
    require(
        fits, "harness.decay_iterations", iterations, f"0 (the run's), or above warmup_iterations={warmup_iterations}"
    )
