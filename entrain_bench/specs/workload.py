"""What the suite asks of a workload."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.specs.tokens import TokenRules


class ShapeSource(Protocol):
    """Samples of one workload under one model's token rules."""

    def batch(self, iteration: int, num_samples: int, seed: int) -> SampleShapes:
        """The training stream: the same arguments always give the same samples, whatever was asked before."""
        ...

    def draw(self, num_samples: int, rng: np.random.Generator) -> SampleShapes:
        """Independent draws (with replacement) for profiling."""
        ...


class Workload(Protocol):
    """A named distribution of samples; parameters are plain values from its YAML."""

    @property
    def name(self) -> str:
        """What the workload is called in tables."""
        ...

    def fingerprint(self) -> str:
        """Hash of the data behind the workload, so that records notice a changed file; empty when there is none."""
        ...

    def source(self, rules: TokenRules) -> ShapeSource:
        """The workload's samples as the given model sees them.

        Raises:
            UserError: for unreadable or invalid data, naming file, row and column.
        """
        ...
