"""Loads of chunks of packed sequences: the sizes that times of layers depend on, and how uneven they are over ranks.

If context parallelism cuts each sample, as Megatron-Core does, every rank has the same share of its attention. If it
cuts the pack as one sequence, a rank has whole samples or late parts of them, and how many keys its queries see depends
on which (WLB-LLM, arXiv:2503.17924: per-document and per-sequence sharding). The labels of a sample are at its end, so
the rank with its last piece has most of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike

from entrain_bench.base.arrays import FloatArray, IntArray, offsets_from_counts, sum_rows, take_rows
from entrain_bench.specs.cluster import FLASH2, UNFUSED
from entrain_bench.specs.context_pieces import pair_by_rank, split_pieces
from entrain_bench.specs.framework import PACK, FrameworkOptions
from entrain_bench.specs.layer import Attention, Layer
from entrain_bench.specs.model import ModuleSpec


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


# Rows and columns of a flash-attention tile (FlashAttention-2's forward kernel for head dimensions up to 128,
# arXiv:2307.08691).
QUERY_TILE = 128
KEY_TILE = 64


@dataclass(frozen=True, slots=True)
class Loads:
    """The work of a module's chunks, as cost models need it.

    Attributes:
        tokens: packed tokens ``[chunks]``.
        areas: score-matrix elements of each layer kind with attention, for the roofline padded; of a head with logits
            of labelled tokens only, those tokens ``[chunks]``.
        segments: sequences, or windows, that each such kind attends in, for those who ask ``[chunks]``.
        packs: the sequences, where it matters to context parallelism how it cuts them.
    """

    tokens: FloatArray
    areas: Mapping[str, FloatArray]
    segments: Mapping[str, FloatArray] = field(default_factory=dict)
    packs: Packs | None = None

    def take(self, rows: IntArray) -> Loads:
        """Those of the given chunks."""
        packs = None if self.packs is None else self.packs.take(rows)
        areas, segments = (
            {name: values[rows] for name, values in by_kind.items()} for by_kind in (self.areas, self.segments)
        )
        return Loads(self.tokens[rows], areas, segments, packs)

    @property
    def content(self) -> tuple[object, ...]:
        """All that the roofline reads of them."""
        columns: list[IntArray | FloatArray] = [self.tokens, *self.areas.values()]
        if self.packs is not None:
            columns += [self.packs.lengths, self.packs.offsets]
            if self.packs.labelled is not None:
                columns.append(self.packs.labelled)
        return *self.areas, *((column.dtype.char, column.tobytes()) for column in columns)


def padded(sizes: ArrayLike, tile: int) -> FloatArray:
    """Sizes rounded up to whole tiles."""
    return np.ceil(np.asarray(sizes, np.float64) / tile) * tile


def score_area(attention: Attention, lengths: IntArray, kernel: str = FLASH2) -> FloatArray:
    """Elements of the padded score tiles of each sequence ``[sequences]``; causal kernels skip the upper tiles.

    Unfused kernels skip none.
    """
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
    labelled: IntArray | None = None,
    kernel: str = FLASH2,
) -> Loads:
    """Loads of chunks made of sequences of the given lengths; without offsets each sequence is a chunk of its own."""
    kinds = {kind.kind: kind.attention for kind in module.kinds if kind.attention}
    areas = {name: score_area(attention, lengths, kernel) for name, attention in kinds.items()}
    areas |= count_labelled(module, lengths, labelled)
    if offsets is None:
        return Loads(np.asarray(lengths, np.float64), areas)
    # Tiles make areas multiples of 2^12, so sums over all chunks are exact below 2^65: 2^26 sequences of 2^20 tokens.
    return Loads(sum_rows(offsets, lengths), {name: sum_rows(offsets, area) for name, area in areas.items()})


def count_labelled(module: ModuleSpec, lengths: IntArray, labelled: IntArray | None) -> dict[str, FloatArray]:
    """Labelled tokens of each sequence, by default all, by the kind of layer that tells them apart, if there is one."""
    given = np.asarray(lengths if labelled is None else labelled, np.float64)
    return {kind.kind: given for kind in module.kinds if kind.labelled}


def packed(
    loads: Loads,
    module: ModuleSpec,
    lengths: IntArray,
    offsets: IntArray | None,
    framework: FrameworkOptions,
    labelled: IntArray | None = None,
) -> Loads:
    """The loads with the sequences of their chunks, if it matters to context parallelism how it cuts them.

    It does for attention if it cuts chunks as a whole, and for a head over labelled tokens.
    """
    whole = framework.cp_split == PACK and offsets is not None
    told = any(kind.labelled for kind in module.kinds)
    if not whole and not told:
        return loads
    lengths = np.asarray(lengths)
    offsets = np.arange(len(lengths) + 1) if offsets is None else np.asarray(offsets)
    some = None
    if told:
        some = lengths if labelled is None else np.asarray(labelled)
    return replace(loads, packs=Packs(lengths, offsets, framework.cp_split == PACK, some))


def busiest_area(layer: Layer, loads: Loads, cp: int) -> FloatArray:
    """Area of each chunk as if all ranks had as much as the busiest one of ``cp`` has ``[chunks]``."""
    area = loads.areas[layer.kind]
    if loads.packs is None or not layer.attention or not layer.tensor_parallel:
        return area
    return area * loads.packs.slowest_share(layer.attention, cp)


def most_labelled(layer: Layer, loads: Loads, cp: int) -> FloatArray:
    """Labelled tokens of each chunk, as if all ranks had as many as the one of ``cp`` with most ``[chunks]``."""
    if loads.packs is None or cp == 1:
        return loads.areas[layer.kind]
    return cp * loads.packs.most_labelled(cp)
