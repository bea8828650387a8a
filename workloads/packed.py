"""Image-text pairs packed into sequences of one length."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.errors import require
from entrain_bench.specs.shapes import Items, SampleShapes, shapes_of
from entrain_bench.specs.tokens import MAX_TOKENS, TokenRules

from .marginals import Marginal, parse_marginal
from .sample_blocks import BlockSource, Generated


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWorkload(Generated):
    """Samples of ``sequence_tokens`` LLM tokens, packed from pairs of a caption and an image in the order of the draw.

    A sample takes pairs as long as they fit; the pair that does not starts the next one. What is left is padding, which
    the LLM processes like text. ``caption`` is a distribution of text tokens, ``image`` of patches, both at least 1.
    """

    name: str
    sequence_tokens: int
    caption: float | Mapping[str, object]
    image: float | Mapping[str, object]

    def __post_init__(self) -> None:
        require(bool(self.name), "workload.name", repr(self.name), "text that is not empty")
        fits = 2 <= self.sequence_tokens <= MAX_TOKENS
        require(fits, "workload.sequence_tokens", self.sequence_tokens, f"at least 2, at most {MAX_TOKENS}")
        for key in ("caption", "image"):
            largest = float(parse_marginal(getattr(self, key), f"workload.{key}").ppf(np.array([1.0]))[0])
            fits = largest <= self.sequence_tokens // 2
            allowed = f"at most half of sequence_tokens={self.sequence_tokens}; set max"
            require(fits, f"workload.{key}", f"{largest:g} (at most)", allowed)

    def source(self, rules: TokenRules) -> PackedSource:
        """The generator of samples; a square of ``merge_patches`` patches becomes one LLM token.

        Raises ``UserError`` for sequences longer than the LLM takes: planners draw thousands before a run would say so.
        """
        most = rules.context_tokens or MAX_TOKENS
        field = "workload.sequence_tokens"
        allowed = f"at most {most}, the LLM's context_tokens"
        require(self.sequence_tokens <= most, field, self.sequence_tokens, allowed)
        caption, image = (parse_marginal(getattr(self, key), f"workload.{key}") for key in ("caption", "image"))
        return PackedSource(self.name, self.sequence_tokens, caption, image, rules.merge_patches**2)


@dataclass(frozen=True, slots=True)
class PackedSource(BlockSource):
    """Generator of packed samples; attributes as in ``PackedWorkload``, and the patches of an LLM token."""

    BLOCK_SAMPLES: ClassVar[int] = 256

    sequence_tokens: int
    caption: Marginal
    image: Marginal
    merged_patches: int

    def generate(self, rng: np.random.Generator, first_id: int) -> SampleShapes:
        """A block of samples, numbered from ``first_id``."""
        return self._pack(rng, self.BLOCK_SAMPLES, first_id)

    def draw(self, num_samples: int, rng: np.random.Generator) -> SampleShapes:
        """Independent samples."""
        require(num_samples >= 1, "num_samples", num_samples, "at least 1")
        return self._pack(rng, num_samples, 0)

    def _pack(self, rng: np.random.Generator, num_samples: int, first_id: int) -> SampleShapes:
        patches = np.zeros(0, np.int64)
        ends = list[int]()
        bounds = [0]
        while len(bounds) <= num_samples:
            filled = ends[bounds[-1] - 1] if bounds[-1] else 0
            # The first pair that does not fit; it must have been drawn.
            last = bisect_right(ends, filled + self.sequence_tokens, bounds[-1])
            if last < len(ends):
                bounds.append(last)
                continue
            more = _sizes(self.image, rng.random(16 * num_samples))
            pairs = self._projected(more) + _sizes(self.caption, rng.random(len(more)))
            ends += ((ends[-1] if ends else 0) + np.cumsum(pairs)).tolist()
            patches = np.append(patches, more)
        patches = patches[: bounds[-1]]
        projected = self._projected(patches)
        offsets = np.array(bounds)
        text = self.sequence_tokens - np.add.reduceat(projected, offsets[:-1])
        items = Items(np.diff(offsets), patches, projected)
        return shapes_of(text, {"image": items}, np.arange(first_id, first_id + num_samples))

    def _projected(self, patches: IntArray) -> IntArray:
        return -(-patches // self.merged_patches)


def _sizes(marginal: Marginal, u: FloatArray) -> IntArray:
    return np.maximum(1, marginal.rounded(u)).astype(np.int64)
