"""Sources whose samples are generated a block at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from entrain_bench.base.errors import require
from entrain_bench.specs.shapes import SampleShapes, concatenate
from entrain_bench.specs.workload import one_of_two, stable_rng, stream_blocks

# The samples of a block, the unit of random access.
BLOCK_SAMPLES = 4096


class Generated:
    """A workload that its YAML describes in full."""

    __slots__ = ()

    def fingerprint(self) -> str:
        """Empty: there is no data."""
        return ""


@dataclass(slots=True)
class _Drawn:
    """The block a generator draws from, and how many samples it has drawn in all."""

    by: np.random.Generator | None = None
    block: SampleShapes | None = None
    num_samples: int = 0


@dataclass(frozen=True, slots=True)
class BlockSource(ABC):
    """A stream of samples of which a block is generated at once; ``name`` seeds them."""

    BLOCK_SAMPLES: ClassVar[int] = BLOCK_SAMPLES

    name: str
    _blocks: dict[tuple[int, int], SampleShapes] = field(default_factory=dict, repr=False, compare=False, kw_only=True)
    _drawn: _Drawn = field(default_factory=_Drawn, repr=False, compare=False, kw_only=True)

    @abstractmethod
    def generate(self, rng: np.random.Generator, first_id: int) -> SampleShapes:
        """A block of samples, numbered from ``first_id``."""

    def batch(self, iteration: int, num_samples: int, seed: int) -> SampleShapes:
        """Samples ``iteration * num_samples`` and following of the stream that belongs to the seed."""
        blocks = stream_blocks(iteration, num_samples, seed, self.BLOCK_SAMPLES)
        return concatenate([self._block(seed, block).take(np.arange(lo, hi)) for block, lo, hi in blocks])

    def draw(self, num_samples: int, rng: np.random.Generator) -> SampleShapes:
        """Independent samples, numbered in the order in which this generator drew them.

        A block is generated at a time; what a call leaves of it goes to the generator's next call.
        """
        require(num_samples >= 1, "num_samples", num_samples, "at least 1")
        drawn = self._drawn
        if drawn.by is not rng:
            drawn.by = rng
            drawn.num_samples = 0
        first = drawn.num_samples
        last = drawn.num_samples + num_samples
        parts = []
        while first < last:
            start = first - first % BLOCK_SAMPLES
            if first == start:
                drawn.block = self.generate(rng, start)
            end = min(last, start + BLOCK_SAMPLES)
            assert drawn.block is not None, "the first sample of a block generates it"
            parts.append(drawn.block.take(np.arange(first - start, end - start)))
            first = end
        drawn.num_samples = last
        return concatenate(parts)

    def _block(self, seed: int, block: int) -> SampleShapes:
        def make() -> SampleShapes:
            return self.generate(stable_rng(self.name, seed, block), block * self.BLOCK_SAMPLES)

        return one_of_two(self._blocks, (seed, block), make)
