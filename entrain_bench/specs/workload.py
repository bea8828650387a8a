"""The interface of workloads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.specs.tokens import TokenRules

# Numbers of samples by what became of them; of a mixture by component, each with its ``share``.
type Counts = Mapping[str, float | Counts]


class ShapeSource(Protocol):
    """Samples of one workload under one model's token rules."""

    def batch(self, iteration: int, num_samples: int, seed: int) -> SampleShapes:
        """Return samples of the training stream; the same arguments always give the same samples."""

    def draw(self, num_samples: int, rng: np.random.Generator) -> SampleShapes:
        """Draw independent samples (with replacement) for profiling."""


def counts_of(source: ShapeSource) -> Counts:
    """Return how many of a source's samples were used, shortened or dropped; empty for generated samples."""
    counts: Counts = getattr(source, "counts", {})
    return counts


class Workload(Protocol):
    """A named distribution of samples; parameters are plain values from its YAML."""

    @property
    def name(self) -> str:
        """Name of the workload in tables."""

    def fingerprint(self) -> str:
        """Return a hash of the workload's data file, so that records notice a change; empty without a file."""

    def source(self, rules: TokenRules) -> ShapeSource:
        """Return the samples as a model sees them; ``UserError`` names file, row and column of invalid data."""
