"""The learning rate of every iteration: linear warm-up, then constant, or down along a line or half a cosine."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi

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
