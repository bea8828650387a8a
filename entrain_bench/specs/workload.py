"""Workloads: their interface, and streams of listed samples."""

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from entrain_bench.base.arrays import IntArray
from entrain_bench.base.errors import require
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.specs.tokens import TokenRules

# Numbers of samples by treatment; of a mixture by component, each with its ``share``.
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


def stable_rng(name: str, *key: int) -> np.random.Generator:
    """A generator that depends on the name and the key only, on every machine and in every process."""
    return np.random.default_rng([zlib.crc32(name.encode()), *key])


def one_of_two[Key, Value](kept: dict[Key, Value], key: Key, make: Callable[[], Value]) -> Value:
    """Return the value of a key; the two latest values are kept, because a stream moves forward."""
    if key not in kept:
        while len(kept) > 1:
            del kept[next(iter(kept))]
        kept[key] = make()
    return kept[key]


def stream_blocks(iteration: int, num_samples: int, seed: int, block_samples: int) -> Iterator[tuple[int, int, int]]:
    """The parts ``(block, start, stop)`` of blocks that make up an iteration; ``UserError`` if negative or empty."""
    require(iteration >= 0, "iteration", iteration, "0 or more")
    require(seed >= 0, "seed", seed, "0 or more")
    require(num_samples >= 1, "num_samples", num_samples, "at least 1")
    first = iteration * num_samples
    last = (iteration + 1) * num_samples
    for block in range(first // block_samples, (last - 1) // block_samples + 1):
        base = block * block_samples
        yield block, max(first - base, 0), min(last - base, block_samples)


@dataclass(frozen=True, slots=True)
class ListedShapes:
    """A source of listed samples, repeated in new random orders."""

    name: str  # also seeds the orders
    shapes: SampleShapes
    num_truncated: int = 0  # samples that were shortened to the model's context
    num_dropped: int = 0  # further samples that were left out
    rows: IntArray | None = None  # rows of the data set that the samples are, -1: unknown; None: in their order

    @property
    def counts(self) -> dict[str, int]:
        """Number of samples, of shortened samples and of left-out samples."""
        return {"listed": len(self.shapes), "truncated": self.num_truncated, "dropped": self.num_dropped}

    def batch(self, iteration: int, num_samples: int, seed: int) -> SampleShapes:
        """Return samples ``iteration * num_samples`` and following of the seed's stream."""
        count = len(self.shapes)
        blocks = stream_blocks(iteration, num_samples, seed, count)
        orders = [stable_rng(self.name, seed, epoch).permutation(count)[lo:hi] for epoch, lo, hi in blocks]
        return self.shapes.take(np.concatenate(orders))

    def draw(self, num_samples: int, rng: np.random.Generator) -> SampleShapes:
        """Draw samples independently and uniformly."""
        require(num_samples >= 1, "num_samples", num_samples, "at least 1")
        return self.shapes.take(rng.integers(len(self.shapes), size=num_samples))
