"""Loads of chunks of packed sequences: the sizes that times of layers depend on, and how uneven they are over ranks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from entrain_bench.base.arrays import FloatArray, IntArray, offsets_from_counts, sum_rows, take_rows
from entrain_bench.specs.cluster import FLASH2, UNFUSED
from entrain_bench.specs.framework import PACK, SAMPLE
from entrain_bench.specs.layer import Attention, Layer
from entrain_bench.specs.model import ModuleSpec


@dataclass(frozen=True, slots=True)
class Packs:
    """Sequences of packed chunks in their order, as CSR rows; context parallelism cuts each chunk as one sequence."""

    lengths: IntArray  # tokens of each sequence [sequences]
    offsets: IntArray  # sequences of each chunk [chunks + 1]

    def take(self, rows: IntArray) -> "Packs":
        """Return the chunks with the given indices."""
        offsets, entries = take_rows(self.offsets, rows)
        return Packs(self.lengths[entries], offsets)

    def slowest_share(self, attention: Attention, cp: int) -> FloatArray:
        """Score elements of the busiest of ``cp`` ranks over those of an even share, at least 1 ``[chunks]``."""
        even = cp == 1 or attention.window_tokens or attention.context_tokens
        if even or not len(self.lengths):
            return np.ones(len(self.offsets) - 1)
        sizes = self.lengths.astype(np.int64)
        causal = attention.causal

        def seen(sequence: IntArray, inside: IntArray) -> IntArray:
            """Score elements of the first ``inside`` tokens of a sequence."""
            return np.asarray(inside * (inside + 1) // 2 if causal else inside * sizes[sequence])

        every = np.arange(len(sizes))
        first = offsets_from_counts(sizes)
        bounds = first[self.offsets]
        cuts = bounds[:-1, None] + split_pieces(np.diff(bounds), cp)
        sequence = np.minimum(np.searchsorted(first, cuts, side="right") - 1, len(every) - 1)
        before = offsets_from_counts(seen(every, sizes))
        ranks = pair_by_rank(np.diff(before[sequence] + seen(sequence, cuts - first[sequence]), axis=1))
        total = ranks.sum(axis=1)
        return np.where(total > 0, cp * ranks.max(axis=1) / np.maximum(total, 1), 1.0)


def split_pieces(tokens: IntArray, cp: int) -> IntArray:
    """Bounds of the pieces into which sequences are cut, from 0 ``[sequences, 2 * cp + 1]``; training reads them, too.

    A rank takes the r-th piece from the front and from the end (Megatron-LM's ``get_batch_on_this_cp_rank``).
    """
    return np.asarray(tokens)[:, None] * np.arange(2 * cp + 1) // (2 * cp)


def pair_by_rank(pieces: IntArray) -> IntArray:
    """Sum the two pieces of each rank: ``[sequences, 2 * cp]`` to ``[sequences, cp]``."""
    cp = pieces.shape[1] // 2
    return np.asarray(pieces[:, :cp] + pieces[:, : cp - 1 : -1])


def cut_units(lengths: IntArray, *, whole_pack: bool) -> IntArray:
    """Return the tokens of each unit that CP cuts: every sequence, or the whole pack."""
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


# Rows and columns of a tile of FlashAttention-2's forward for head dimensions up to 128 (arXiv:2307.08691).
QUERY_TILE = 128
KEY_TILE = 64


@dataclass(frozen=True, slots=True)
class Loads:
    """The work of a module's chunks, as cost models need it."""

    tokens: FloatArray  # packed [chunks]
    areas: Mapping[str, FloatArray]  # score-matrix elements by kind, padded for the roofline [chunks]
    segments: Mapping[str, FloatArray] = field(default_factory=dict)  # sequences, or windows, of each kind [chunks]
    packs: Packs | None = None  # the sequences, where it matters to context parallelism how it cuts them
    routed: FloatArray | None = None  # tokens of the experts' even share, if that is not ``tokens`` [chunks]

    def take(self, rows: IntArray) -> "Loads":
        """Return the chunks with the given indices."""
        packs = None if self.packs is None else self.packs.take(rows)
        routed = None if self.routed is None else self.routed[rows]
        return replace(self._changed(lambda values: values[rows]), packs=packs, routed=routed)

    def packed_by(self, offsets: IntArray | None) -> "Loads":
        """Sum loads of sequences to loads of chunks; without offsets, return them unchanged."""
        return self if offsets is None else self._changed(partial(sum_rows, offsets))

    def _changed(self, change: Callable[[FloatArray], FloatArray]) -> "Loads":
        areas = {name: change(values) for name, values in self.areas.items()}
        segments = {name: change(values) for name, values in self.segments.items()}
        return Loads(change(self.tokens), areas, segments)

    @property
    def content(self) -> tuple[object, ...]:
        """The values that the roofline reads."""
        columns: list[IntArray | FloatArray] = [self.tokens, *self.areas.values()]
        if self.packs is not None:
            columns += [self.packs.lengths, self.packs.offsets]
        if self.routed is not None:
            columns.append(self.routed)
        return *self.areas, *((column.dtype.char, column.tobytes()) for column in columns)


def padded(sizes: ArrayLike, tile: int) -> FloatArray:
    """Sizes rounded up to whole tiles."""
    return np.ceil(np.asarray(sizes, np.float64) / tile) * tile


def score_area(attention: Attention, lengths: IntArray, kernel: str = FLASH2) -> FloatArray:
    """Elements of padded score tiles ``[sequences]``; causal kernels skip the upper tiles, unfused ones none."""
    if attention.window_tokens:
        window = attention.window_tokens
        full, rest = np.divmod(lengths, window)
        area = full * (padded(window, QUERY_TILE) * padded(window, KEY_TILE))
        return area + padded(rest, QUERY_TILE) * padded(rest, KEY_TILE)
    queries = np.ceil(np.asarray(lengths) * attention.rows_per_token)
    rows = padded(queries, QUERY_TILE)
    columns = padded(attention.context_tokens or queries, KEY_TILE)
    skips = attention.causal and kernel != UNFUSED
    return np.minimum(rows * (columns + QUERY_TILE) / 2, rows * columns) if skips else rows * columns


def compute_loads(
    module: ModuleSpec,
    lengths: IntArray,
    offsets: IntArray | None = None,
    cp_split: str = SAMPLE,
    score: Callable[[Attention, IntArray], FloatArray] = score_area,
    count: Callable[[Attention, IntArray], FloatArray] | None = None,
) -> Loads:
    """Loads of chunks of sequences, without offsets of each sequence; with ``packs`` if CP cuts whole chunks."""
    attentions = {kind.kind: kind.attention for kind in module.kinds if kind.attention}
    areas = {name: score(attention, lengths) for name, attention in attentions.items()}
    segments = {name: count(attention, lengths) for name, attention in attentions.items()} if count else {}
    # Tiles make areas multiples of 2^12, so sums over all chunks are exact below 2^65: 2^26 sequences of 2^20 tokens.
    loads = Loads(np.asarray(lengths, np.float64), areas, segments).packed_by(offsets)
    if cp_split != PACK or offsets is None:
        return loads
    return replace(loads, packs=Packs(np.asarray(lengths), offsets))


def busiest_area(layer: Layer, loads: Loads, cp: int) -> FloatArray:
    """Return the score area of each chunk if all ``cp`` ranks had the load of the busiest one ``[chunks]``."""
    area = loads.areas[layer.kind]
    if loads.packs is None or not layer.attention or not layer.tensor_parallel:
        return area
    return area * loads.packs.slowest_share(layer.attention, cp)
