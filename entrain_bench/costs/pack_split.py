"""How uneven attention is over context-parallel ranks that cut a packed microbatch as a whole.

The r-th of c ranks takes the r-th of 2 c equal pieces from the front and from the end, which is even for one causal
sequence. Cut sample by sample, as Megatron-Core's packed sequences are, every rank has the same share of each. Cut as
one sequence, it has whole samples or late parts of them, and how many keys its queries see depends on which (WLB-LLM,
arXiv:2503.17924, calls the one per-document and the other per-sequence sharding).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entrain_bench.base.arrays import FloatArray, IntArray, offsets_from_counts, take_rows
from entrain_bench.specs.layer import Attention


@dataclass(frozen=True, slots=True)
class Packs:
    """Sequences of packed chunks in their order, as CSR rows.

    Attributes:
        lengths: tokens of each sequence ``[sequences]``.
        offsets: sequences of each chunk ``[chunks + 1]``.
    """

    lengths: IntArray
    offsets: IntArray

    def take(self, rows: IntArray) -> Packs:
        """Those of the given chunks."""
        offsets, entries = take_rows(self.offsets, rows)
        return Packs(self.lengths[entries], offsets)

    def slowest_share(self, attention: Attention, cp: int) -> FloatArray:
        """Score elements of the busiest of ``cp`` ranks over those of an even share, at least 1 ``[chunks]``.

        Windows and fixed contexts make the work of a token the same everywhere, so they are even.
        """
        num_chunks = len(self.offsets) - 1
        if cp == 1 or attention.window_tokens or attention.context_tokens or not len(self.lengths):
            return np.ones(num_chunks)
        first = offsets_from_counts(self.lengths)
        bounds = first[self.offsets]
        tokens = np.diff(bounds)
        cuts = bounds[:-1, None] + tokens[:, None] * np.arange(2 * cp + 1) // (2 * cp)
        pieces = np.diff(self._scores_before(cuts, first, attention.causal), axis=1)
        ranks = pieces[:, :cp] + pieces[:, : cp - 1 : -1]
        total = ranks.sum(axis=1)
        return np.where(total > 0, cp * ranks.max(axis=1) / np.maximum(total, 1), 1.0)

    def _scores_before(self, position: IntArray, first: IntArray, causal: bool) -> IntArray:
        """Score elements of all queries before each position of all chunks laid end to end, of the shape given."""
        sizes = self.lengths.astype(np.int64)
        whole = offsets_from_counts(sizes * (sizes + 1) // 2 if causal else sizes * sizes)
        sequence = np.minimum(np.searchsorted(first, position, side="right") - 1, len(sizes) - 1)
        inside = position - first[sequence]
        part = inside * (inside + 1) // 2 if causal else inside * sizes[sequence]
        return np.asarray(whole[sequence] + part)
