"""A mixture of workloads: every sample comes whole from one of them."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import require
from entrain_bench.specs.shapes import SampleShapes, concatenate
from entrain_bench.specs.tokens import TokenRules
from entrain_bench.specs.workload import Counts, ShapeSource, Workload, counts_of, stable_rng

from .marginals import POSITIVE
from .synthetic import Name


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureWorkload:
    """Samples of several workloads by key, with weights of any sum; ``name`` seeds the choice."""

    name: Name
    weights: Mapping[str, float]
    components: Mapping[str, Workload]

    def __post_init__(self) -> None:
        keys = sorted(self.components)
        same = bool(keys) and keys == sorted(self.weights)
        require(same, "workload.weights", dict(self.weights), f"one each of {keys}")
        for key, weight in self.weights.items():
            POSITIVE.check(weight, f"workload.weights.{key}")

    def fingerprint(self) -> str:
        """Hash of the components' data; empty if they have none."""
        fingerprints = [self.components[key].fingerprint() for key in sorted(self.components)]
        return hashlib.sha256("\n".join(fingerprints).encode()).hexdigest() if any(fingerprints) else ""

    def source(self, rules: TokenRules) -> "MixtureSource":
        """The sources of all components."""
        keys = sorted(self.components)
        weights = np.array([self.weights[key] for key in keys], np.float64)
        sources = tuple(self.components[key].source(rules) for key in keys)
        return MixtureSource(self.name, weights / weights.sum(), sources, tuple(keys))


@dataclass(frozen=True, slots=True)
class MixtureSource:
    """Draws the component of each sample, then takes that place of the component's own stream."""

    name: str
    shares: FloatArray
    sources: tuple[ShapeSource, ...]
    keys: tuple[str, ...]

    @property
    def counts(self) -> Counts:
        """Return share and sample counts of every component that lists its samples."""
        parts = zip(self.keys, self.shares.tolist(), map(counts_of, self.sources), strict=True)
        return {key: {"share": share, **counts} for key, share, counts in parts if counts}

    def batch(self, iteration: int, num_samples: int, seed: int) -> SampleShapes:
        """Samples ``iteration * num_samples`` and following of the stream that belongs to the seed."""
        # Uniforms of the whole stream come in order, so the sizes of batches do not matter.
        rng = stable_rng(self.name, seed, 0)
        rng.bit_generator.advance(iteration * num_samples)  # type: ignore[attr-defined]
        parts = [source.batch(iteration, num_samples, seed) for source in self.sources]
        return self._pick(rng.random(num_samples), parts)

    def draw(self, num_samples: int, rng: np.random.Generator) -> SampleShapes:
        """Independent samples."""
        parts = [source.draw(num_samples, rng) for source in self.sources]
        return self._pick(rng.random(num_samples), parts)

    def _pick(self, uniform: FloatArray, parts: list[SampleShapes]) -> SampleShapes:
        """Sample i of the component that ``uniform[i]`` falls on."""
        chosen = np.minimum(np.searchsorted(np.cumsum(self.shares), uniform, side="right"), len(parts) - 1)
        names = tuple(dict.fromkeys(name for part in parts for name in part.modalities))
        united = concatenate([_rename(part, names) for part in parts])
        return united.take(chosen * len(uniform) + np.arange(len(uniform)))


def _rename(shapes: SampleShapes, modalities: tuple[str, ...]) -> SampleShapes:
    """The same samples with modalities numbered by another list that holds theirs."""
    number = np.array([modalities.index(name) for name in shapes.modalities], np.int64)
    return replace(shapes, modalities=modalities, item_modality=number[shapes.item_modality])
