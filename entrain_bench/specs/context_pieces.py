"""How context parallelism cuts sequences: 2 x CP pieces, of which a rank takes one from the front and one from the end.

Under a causal mask the r-th piece of 2 c and the r-th from the end together see as many keys for every r, so the ranks
of a group of c have equal work (Megatron-LM's ``get_batch_on_this_cp_rank``). Megatron-Core's packed sequences are cut
sample by sample (Transformer Engine's ``thd``), which pads each sample to a multiple of 2 c tokens; here pieces differ
by a token instead, and the rows of the ranks are padded once, at their end. The simulator and training both read this.
"""

from __future__ import annotations

import numpy as np

from entrain_bench.base.arrays import IntArray


def split_pieces(tokens: IntArray, cp: int) -> IntArray:
    """Bounds of the pieces of sequences of so many tokens, from 0 ``[sequences, 2 * cp + 1]``."""
    return np.asarray(tokens)[:, None] * np.arange(2 * cp + 1) // (2 * cp)


def pair_by_rank(pieces: IntArray) -> IntArray:
    """Add the two pieces of each rank: ``[sequences, 2 * cp]`` to ``[sequences, cp]``."""
    cp = pieces.shape[1] // 2
    return np.asarray(pieces[:, :cp] + pieces[:, : cp - 1 : -1])


def cut_units(lengths: IntArray, *, whole_pack: bool) -> IntArray:
    """Tokens of what is cut: of each sequence, or of the pack that they make."""
    return np.array([np.sum(lengths)]) if whole_pack else np.asarray(lengths)


def rank_rows(lengths: IntArray, cp: int, *, whole_pack: bool, parts: int = 1) -> int:
    """Rows that each of ``cp`` ranks holds of a pack: those of the fullest rank, as a multiple of ``parts``."""
    held = pair_by_rank(np.diff(split_pieces(cut_units(lengths, whole_pack=whole_pack), cp), axis=1)).sum(axis=0)
    return int(-(-held.max() // parts) * parts)


def rows_of_ranks(lengths: IntArray, cp: int, *, whole_pack: bool, parts: int = 1) -> IntArray:
    """Rows of a pack that each rank holds, unit by unit, front piece first; -1 for padding ``[cp, rank_rows]``."""
    units = cut_units(lengths, whole_pack=whole_pack)
    bounds = (np.cumsum(units) - units)[:, None] + split_pieces(units, cp)
    rows = np.full((cp, rank_rows(lengths, cp, whole_pack=whole_pack, parts=parts)), -1)
    for rank, rank_row in enumerate(rows):
        pair = [rank, 2 * cp - 1 - rank]
        starts = bounds[:, pair].ravel()
        counts = np.diff(bounds, axis=1)[:, pair].ravel()
        ends = np.cumsum(counts)
        rank_row[: ends[-1]] = np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1])
    return rows
