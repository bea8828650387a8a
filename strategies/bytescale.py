"""ByteScale's hybrid data parallelism (arXiv:2502.21231): ranks by length, and microbatches by time.

A rank of the DP x CP plane holds activations up to a capacity. A sequence takes as few ranks as hold it (section 5.1),
without the offloading of section 5.2. Sequences go to the ranks with the least load (Algorithm 2), so ranks run unequal
numbers of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import ClassVar

import numpy as np

from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.rank_groups import room_bytes, sample_costs
from entrain_bench.balancing.rounds import Rounds, check_plane, round_labels
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.compiled import njit
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.parse import Count
from entrain_bench.specs.shapes import SampleShapes


def hybrid_rounds(
    seconds: FloatArray, bytes_: IntArray, level: IntArray, num_ranks: int, capacity: int, num_buckets: int
) -> Rounds:
    """Ranks and microbatch of each sequence on groups of ``2 ** level`` ranks ``[sequences]``.

    Wide groups come first, so a rank has its microbatches 0, 1, ... in the same order as other ranks of a group.
    """
    order = np.lexsort((-seconds, -level))
    num_wide = int(np.count_nonzero(level))
    narrow = order[num_wide:]
    ends_s = np.cumsum(seconds[narrow])
    middle_s = ends_s - seconds[narrow] / 2
    total_s = float(ends_s[-1]) if len(narrow) else 0.0
    starts = num_wide + np.searchsorted(num_buckets * middle_s, total_s * np.arange(1, num_buckets))
    bounds = np.concatenate([[num_wide], starts, [len(order)]])
    first, number, before = _dealt(order, level, seconds, num_ranks, bounds)
    by_rank = narrow[np.argsort(first[narrow], kind="stable")]
    pack = best_fit(by_rank, bytes_, first, capacity)
    last = np.zeros(num_ranks, np.int64)
    np.maximum.at(last, first[by_rank], pack)
    # The first pack, of the longest sequences, runs last: its backward hides the reduction of gradients.
    number[by_rank] = (before + last)[first[by_rank]] - pack
    return Rounds(number, first, 1 << level)


@njit()
def _dealt(order, level, seconds, num_ranks, bounds):  # type: ignore[no-untyped-def]
    """Return each sequence's first rank, wide sequences' microbatches, and the number of wide microbatches per rank."""
    first = np.zeros(len(order), np.int64)
    number = np.zeros(len(order), np.int64)
    before = np.zeros(num_ranks, np.int64)
    load = np.zeros(num_ranks)
    for sequence in order[: bounds[0]]:
        width = 1 << level[sequence]
        best = 0
        for begin in range(width, num_ranks - width + 1, width):
            if load[begin : begin + width].max() < load[best : best + width].max():
                best = begin
        first[sequence] = best
        number[sequence] = before[best]
        load[best : best + width] = load[best : best + width].max() + seconds[sequence]
        before[best : best + width] += 1
    upcoming = bounds[:-1].copy()
    behind = [(load[rank], 0, rank) for rank in range(num_ranks)]
    heapify(behind)
    for _ in range(len(order) - bounds[0]):
        busy, count, rank = behind[0]
        bucket = rank * len(upcoming) // num_ranks
        if upcoming[bucket] == bounds[bucket + 1]:
            bucket = 0
            while upcoming[bucket] == bounds[bucket + 1]:
                bucket += 1
        sequence = order[upcoming[bucket]]
        upcoming[bucket] += 1
        first[sequence] = rank
        heapreplace(behind, (busy + seconds[sequence], count + 1, rank))
    return first, number, before


@njit()
def best_fit(order, size, group, capacity):  # type: ignore[no-untyped-def]
    """Return each entry's pack, in the given order: the fullest one of its group with room, or a new one."""
    chosen = np.empty(len(order), np.int64)
    room = np.empty(len(order), np.int64)
    start = 0
    count = 0
    for place, entry in enumerate(order):
        if place and group[entry] != group[order[place - 1]]:
            start = count
        best = count
        for one in range(start, count):
            if size[entry] <= room[one] and (best == count or room[one] < room[best]):
                best = one
        if best == count:
            room[count] = capacity
            count = count + 1
        room[best] -= size[entry]
        chosen[place] = best - start
    return chosen


@dataclass(frozen=True, slots=True)
class HybridData:
    """Groups of as many ranks as a sample's activations need; samples to the ranks with the least estimated time.

    Attributes:
        buckets: length classes of about equal total time; ranks start in different ones (PP-Balance); 1: DP-Balance.
    """

    handles_generators: ClassVar[bool] = True
    handles_widths: ClassVar[bool] = True
    packs: ClassVar[bool] = True
    buckets: Count = 1

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Group and microbatch of every unit; ``IncompatibleError`` without widths."""
        model = profile.job.model
        llm = layout.modules[model.llm_index]
        check_plane(layout, "bytescale", "strategy/planner=hybrid_cp")
        widths = np.array([cp for _, cp in llm.degrees])
        seconds, activations, _ = sample_costs(shapes, layout, profile, spread=False)
        bytes_ = np.ceil(activations).astype(np.int64)
        # A rank's memory limits it; less if the layout asks for more microbatches.
        share = float(bytes_.sum()) / (llm.dp * layout.num_microbatches)
        capacity = max(int(min(share, room_bytes(layout, profile))), -(-int(bytes_.max()) // int(widths[-1])))
        level = np.searchsorted(widths, -(-bytes_ // capacity))
        own_s = decisive(seconds[level, np.arange(len(shapes))])
        rounds = hybrid_rounds(own_s, bytes_, level, llm.dp, capacity, self.buckets)
        return round_labels(model, shapes, layout, rounds, spread=False)
