"""Dynamic context parallelism of Megatron-LM's dev branch (``--dynamic-context-parallel``).

Each round of a batch has groups of its own over the DP x CP plane, wide for long samples. Groups come from rank 0 on,
as they were opened; placed by falling width they are aligned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.rank_groups import first_positions
from entrain_bench.balancing.rounds import Rounds, check_plane, mean_tokens, round_labels
from entrain_bench.base.arrays import IntArray
from entrain_bench.base.compiled import njit
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.parse import Count
from entrain_bench.specs.shapes import SampleShapes

# By how much a rank may exceed the work of one that is full of the longest sequence.
CAP_SLACK = 0.05


def least_width(length: int, capacity: int) -> int:
    """Ranks that a sequence needs at least, a power of two, if a rank holds ``capacity`` tokens."""
    pieces = -(-length // capacity)
    return 1 << max(0, pieces - 1).bit_length()


def dev_rounds(lengths: IntArray, num_ranks: int, capacity: int) -> Rounds:
    """Rounds in which every rank has one pack of at most ``capacity`` tokens (``next_hdp_group_packing_aware``)."""
    least = np.array([least_width(length, capacity) for length in lengths.tolist()], np.int64)
    number, first, width = np.zeros((3, len(lengths)), np.int64)
    left = np.argsort(-lengths, kind="stable")
    while len(left):
        group, widths = _dev_round(lengths[left].astype(np.float64), least[left], num_ranks, float(capacity))
        widths = filled(widths, num_ranks)
        mine = left[group >= 0]
        number[mine] = number.max() + 1
        first[mine] = first_positions(widths)[group[group >= 0]]
        width[mine] = widths[group[group >= 0]]
        left = left[group < 0]
    return Rounds(number - 1, first, width)


@njit()
def _dev_round(length, least, num_ranks, capacity):  # type: ignore[no-untyped-def]
    """Group of each sequence, -1 for those of later rounds, and the widths of groups; sequences by falling length."""
    group = np.full(len(length), -1)
    width = np.zeros(num_ranks, np.int64)
    work = np.zeros(num_ranks)
    tokens = np.zeros(num_ranks)
    count = 0
    free = num_ranks
    busiest = 0.0
    cap = length[0] * capacity * (1.0 + CAP_SLACK)
    for sample in range(len(length)):
        best = -2
        best_width = 0
        best_work = np.inf
        needed = least[sample]
        while needed <= num_ranks and best_work > busiest:
            cost = length[sample] * length[sample] / needed
            for index in range(count):
                if width[index] != needed or tokens[index] + length[sample] / needed > capacity:
                    continue
                after = max(busiest, work[index] + cost)
                if after <= cap and after < best_work:
                    best = index
                    best_width = needed
                    best_work = after
                    if after == busiest:
                        break
            after = max(busiest, cost)
            if free >= needed and after <= cap and after < best_work:
                best = -1
                best_width = needed
                best_work = after
            if sample == 0:
                break
            needed *= 2
        if best == -2:
            continue
        if best == -1:
            best = count
            width[count] = best_width
            count = count + 1
            free = free - best_width
        group[sample] = best
        work[best] += length[sample] * length[sample] / best_width
        tokens[best] += length[sample] / best_width
        busiest = max(busiest, work[best])
    return group, width[:count].copy()


def filled(widths: IntArray, num_ranks: int) -> IntArray:
    """Widths once no rank is idle: the first of the narrowest groups doubles, again and again."""
    widths = widths.copy()
    free = num_ranks - int(widths.sum())
    while free:
        first = int(widths.argmin())
        free -= int(widths[first])
        widths[first] *= 2
    return widths


@dataclass(frozen=True, slots=True)
class GroupsByLength:
    """Groups by LLM tokens alone; each item of a pack is shared by all ranks of its group.

    Attributes:
        max_tokens: LLM tokens of a rank in a round at most, Megatron-LM's ``max_seqlen_per_dp_cp_rank``; None: what it
            has on average in the rounds of the layout. Raised for a batch whose longest sample needs more on all ranks.
    """

    handles_generators: ClassVar[bool] = True
    handles_widths: ClassVar[bool] = True
    max_tokens: Count | None = None

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Group and round of every unit; ``IncompatibleError`` without widths, or if DP x CP is no power of two."""
        model = profile.job.model
        llm = layout.modules[model.llm_index]
        check_plane(layout, "hybrid_cp", "strategy/planner=hybrid_cp")
        if llm.dp & (llm.dp - 1):
            raise IncompatibleError(f"layout: DP x CP is {llm.dp}, must be a power of two, as groups are")
        tokens = np.asarray(shapes.llm_tokens, np.int64)
        capacity = max(self.max_tokens or mean_tokens(profile, layout), -(-int(tokens.max()) // llm.dp))
        return round_labels(model, shapes, layout, dev_rounds(tokens, llm.dp, capacity), spread=False)
