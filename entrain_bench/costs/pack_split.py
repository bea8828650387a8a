"""How uneven work is over context-parallel ranks: attention of a pack that is cut as a whole, and a labelled head.

Cut sample by sample, as Megatron-Core's packed sequences are, every rank has the same share of each sample's attention.
Cut as one sequence, it has whole samples or late parts of them, and how many keys its queries see depends on which
(WLB-LLM, arXiv:2503.17924, calls the one per-document and the other per-sequence sharding). The labels of a sample are
at its end, so whoever has its last piece has most of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from entrain_bench.base.arrays import FloatArray, IntArray, offsets_from_counts, sum_rows, take_rows
from entrain_bench.specs.context_pieces import pair_by_rank, split_pieces
from entrain_bench.specs.layer import Attention


@dataclass(frozen=True, slots=True)
class Packs:
    """Sequences of packed chunks in their order, as CSR rows.

    Attributes:
        lengths: tokens of each sequence ``[sequences]``.
        offsets: sequences of each chunk ``[chunks + 1]``.
        whole: whether chunks are cut as one sequence each, rather than every sequence by itself.
        labelled: labelled tokens of each sequence, the last but one and those before it; None if nobody asks
            ``[sequences]``.
    """

    lengths: IntArray
    offsets: IntArray
    whole: bool = True
    labelled: IntArray | None = None

    def take(self, rows: IntArray) -> Packs:
        """Those of the given chunks."""
        offsets, entries = take_rows(self.offsets, rows)
        told = None if self.labelled is None else self.labelled[entries]
        return Packs(self.lengths[entries], offsets, self.whole, told)

    def slowest_share(self, attention: Attention, cp: int) -> FloatArray:
        """Score elements of the busiest of ``cp`` ranks over those of an even share, at least 1 ``[chunks]``.

        Windows and fixed contexts make the work of a token the same everywhere, so they are even.
        """
        even = cp == 1 or not self.whole or attention.window_tokens or attention.context_tokens
        if even or not len(self.lengths):
            return np.ones(len(self.offsets) - 1)
        sizes = self.lengths.astype(np.int64)
        causal = attention.causal

        def scores(sequence: IntArray, inside: IntArray) -> IntArray:
            return np.asarray(inside * (inside + 1) // 2 if causal else inside * sizes[sequence])

        ranks = self._of_ranks(cp, scores)
        total = ranks.sum(axis=1)
        return np.where(total > 0, cp * ranks.max(axis=1) / np.maximum(total, 1), 1.0)

    def most_labelled(self, cp: int) -> FloatArray:
        """Labelled tokens of the rank of ``cp`` that has most of them ``[chunks]``."""
        assert self.labelled is not None
        labelled = self.labelled
        first = self.lengths - 1 - self.labelled

        def count(sequence: IntArray, inside: IntArray) -> IntArray:
            return np.clip(inside - first[sequence], 0, labelled[sequence])

        return np.asarray(self._of_ranks(cp, count).max(axis=1), np.float64)

    def _of_ranks(self, cp: int, before: Callable[[IntArray, IntArray], IntArray]) -> IntArray:
        """Each rank's share of every chunk ``[chunks, cp]``.

        ``before`` says how much tokens of a sequence before a place in it have.
        """
        every = np.arange(len(self.lengths))
        if not self.whole:
            ranks = pair_by_rank(np.diff(before(every[:, None], split_pieces(self.lengths, cp)), axis=1))
            return np.stack([sum_rows(self.offsets, rank_tokens) for rank_tokens in ranks.T], axis=1)
        first = offsets_from_counts(self.lengths)
        bounds = first[self.offsets]
        cuts = bounds[:-1, None] + split_pieces(np.diff(bounds), cp)
        sequence = np.minimum(np.searchsorted(first, cuts, side="right") - 1, len(every) - 1)
        whole = offsets_from_counts(before(every, self.lengths))
        return pair_by_rank(np.diff(whole[sequence] + before(sequence, cuts - first[sequence]), axis=1))
