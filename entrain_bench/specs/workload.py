"""What the suite asks of a workload."""

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
        """The training stream: the same arguments always give the same samples, whatever was asked before."""
        ...

    def draw(self, num_samples: int, rng: np.random.Generator) -> SampleShapes:
        """Independent draws (with replacement) for profiling."""
        ...


def counts_of(source: ShapeSource) -> Counts:
    """What became of a source's samples; empty of one that makes them."""
    counts: Counts = getattr(source, "counts", {})
    return counts


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
        """The samples as a model sees them; ``UserError`` names file, row and column of invalid data."""
        ...
