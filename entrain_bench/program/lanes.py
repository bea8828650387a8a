"""Lanes: ranks that always act together, and which of them hold each stage of a module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from entrain_bench.base.arrays import IntArray, freeze, offsets_from_counts, take_rows


@dataclass(frozen=True, slots=True)
class Blocks:
    """Lanes of each block (replica or group, stage) of one module, as CSR rows in replica-major order.

    Blocks of any module with equal ``rank_set`` hold the same ranks, ``low`` to ``high``; ``width`` are their ranks.

    Attributes:
        held_offsets, held_lanes: lanes that hold the weights of each stage: ``offsets`` and ``lanes`` where groups are
            replicas, otherwise one CSR row a stage.
    """

    offsets: IntArray
    lanes: IntArray
    num_stages: int
    rank_set: IntArray
    low: IntArray
    high: IntArray
    width: IntArray
    held_offsets: IntArray
    held_lanes: IntArray

    def first_lane(self) -> IntArray:
        """One lane of every block ``[replicas, stages]``."""
        return self.lanes[self.offsets[:-1]].reshape(-1, self.num_stages)

    def of_stage(self, stage: int) -> IntArray:
        """Lanes of all replicas of a stage: those that hold its weights."""
        _, entries = take_rows(self.held_offsets, np.arange(stage, len(self.held_offsets) - 1, self.num_stages))
        return self.held_lanes[entries]


@lru_cache(maxsize=64)
def find_lanes(
    shapes: tuple[tuple[int, int, int, tuple[tuple[int, int], ...]], ...], contents: tuple[bytes, ...]
) -> tuple[IntArray, IntArray, tuple[Blocks, ...]]:
    """Width, lowest rank and blocks of the lanes of modules on the given ranks; many layouts have the same.

    ``shapes`` are those of the ranks, with the widths of groups.
    """
    modules = [
        np.frombuffer(content, np.int64).reshape(shape[:3]) for shape, content in zip(shapes, contents, strict=True)
    ]
    num_ranks = 1 + max(int(ranks.max()) for ranks in modules)
    block_of_rank = np.full((len(modules), num_ranks), -1)
    sets = [
        _group_ranks(ranks, [tp * cp for tp, cp in widths]) if widths else _block_ranks(ranks)
        for ranks, (*_, widths) in zip(modules, shapes, strict=True)
    ]
    # Virtual stages hold the same ranks: number blocks by the first one that does.
    numbers = _numbered(sets)
    for row, ranks, number, (*_, widths) in zip(block_of_rank, modules, numbers, shapes, strict=True):
        if widths:
            # Groups are nested: ranks that share a narrowest one share all. Replicas hold the weights.
            plane = stage_planes(ranks)
            row[plane] = np.arange(plane.size).reshape(plane.shape) // min(tp * cp for tp, cp in widths)
        else:
            row[ranks.reshape(len(number), -1)] = number[:, None]
    used = np.flatnonzero((block_of_rank >= 0).any(axis=0))
    # Ranks with the same blocks in every module are one lane: number the combinations.
    combination = np.ravel_multi_index(tuple(1 + block_of_rank[:, used]), tuple(2 + block_of_rank.max(axis=1)))
    _, first, lane, width = np.unique(combination, return_index=True, return_inverse=True, return_counts=True)
    # Number lanes by their lowest rank, so that neighbours in a figure are neighbours in the cluster.
    order = np.argsort(first, kind="stable")
    lane_of_rank = np.full(num_ranks, -1)
    lane_of_rank[used] = np.argsort(order, kind="stable")[lane]
    blocks = []
    for ranks, number, own_sets, (*_, widths) in zip(modules, numbers, sets, shapes, strict=True):
        block_lanes = _block_lanes(*own_sets, lane_of_rank, len(order))
        held = block_lanes
        if widths:
            plane = stage_planes(ranks)
            held = _block_lanes(plane.ravel(), np.full(len(plane), plane.shape[1]), lane_of_rank, len(order))
        flat, size = own_sets
        starts = offsets_from_counts(size)[:-1]
        low = np.minimum.reduceat(flat, starts)
        high = np.maximum.reduceat(flat, starts)
        blocks.append(Blocks(*block_lanes, ranks.shape[1], number, low, high, size, *held))
        freeze(*block_lanes, number, low, high, size, *held)
    lanes = width[order], used[first[order]]
    freeze(*lanes)
    return *lanes, tuple(blocks)


def stage_planes(ranks: IntArray) -> IntArray:
    """Ranks of each stage, ascending ``[pp, dp * tp * cp]``, of ranks ``[dp, pp, tp * cp]``."""
    return np.sort(ranks.swapaxes(0, 1).reshape(ranks.shape[1], -1), axis=1)


def _block_ranks(ranks: IntArray) -> tuple[IntArray, IntArray]:
    """Ranks of every block, one block after the other, rising, and their number in each."""
    flat = np.sort(ranks.reshape(ranks.shape[0] * ranks.shape[1], -1), axis=1)
    return flat.ravel(), np.full(len(flat), flat.shape[1])


def _group_ranks(ranks: IntArray, widths: Sequence[int]) -> tuple[IntArray, IntArray]:
    """The same of every group and stage, group-major, groups as ``ModuleLayout.widths`` numbers them."""
    plane = stage_planes(ranks)
    counts = [plane.shape[1] // width for width in widths]
    group_ranks = [
        plane[:, : count * width].reshape(len(plane), count, width).swapaxes(0, 1).ravel()
        for count, width in zip(counts, widths, strict=True)
    ]
    return np.concatenate(group_ranks), np.repeat(widths, [count * len(plane) for count in counts])


def _numbered(sets: Sequence[tuple[IntArray, IntArray]]) -> list[IntArray]:
    """Number of every set of ranks by its first place among those of all modules; equal sets have one number."""
    flat, size = (np.concatenate(columns) for columns in zip(*sets, strict=True))
    ends = offsets_from_counts(size)
    low = flat[ends[:-1]]
    high = flat[ends[1:] - 1]
    # A run of consecutive ranks is told by its lowest rank and its length; any other set by its first place.
    key = (1 + low) * (1 + max(len(size), int(size.max()))) + size
    known: dict[bytes, int] = {}
    for index in np.flatnonzero(high - low != size - 1).tolist():
        key[index] = known.setdefault(flat[ends[index] : ends[index + 1]].tobytes(), index)
    _, first, number = np.unique(key, return_index=True, return_inverse=True)
    of_first = np.argsort(np.argsort(first, kind="stable"), kind="stable")[number]
    return np.split(of_first, np.cumsum([len(flat_ranks) for _, flat_ranks in sets])[:-1])


def _block_lanes(flat: IntArray, size: IntArray, lane_of_rank: IntArray, num_lanes: int) -> tuple[IntArray, IntArray]:
    """Lanes of the ranks of each block, ascending, as CSR."""
    block = np.repeat(np.arange(len(size)), size)
    # Neighbours in a block mostly are neighbours among lanes, which a stable sort is quick with; a hash is not.
    entry = np.sort(block * num_lanes + lane_of_rank[flat], kind="stable")
    is_first = np.diff(entry, prepend=-1) > 0
    block, lanes = np.divmod(entry[is_first], num_lanes)
    return offsets_from_counts(np.bincount(block, minlength=len(size))), lanes
