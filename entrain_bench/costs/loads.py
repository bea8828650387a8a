"""Loads of chunks of packed sequences: the sizes that times of layers depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike

from entrain_bench.base.arrays import FloatArray, IntArray, sum_rows
from entrain_bench.costs.pack_split import Packs
from entrain_bench.specs.cluster import FLASH2, UNFUSED
from entrain_bench.specs.framework import PACK, FrameworkOptions
from entrain_bench.specs.layer import Attention, Layer
from entrain_bench.specs.model import ModuleSpec

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
