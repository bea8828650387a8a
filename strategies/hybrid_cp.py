"""Dynamic context parallelism of Megatron-LM (``--dynamic-context-parallel`` and ``--hybrid-context-parallel``).

Each round of a batch has groups of its own over the DP x CP plane, wide for long samples: dev's rounds of packs, main's
of sub-samples. Groups come from rank 0 on, as they were opened; placed by falling width they are aligned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import numpy as np

from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.rank_groups import first_positions
from entrain_bench.balancing.rounds import Rounds, check_plane, mean_tokens, round_labels
from entrain_bench.base.arrays import IntArray
from entrain_bench.base.compiled import njit
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.parse import Count, OneOf
from entrain_bench.specs.shapes import SampleShapes

# By how much a rank may exceed the work of one that is full of the longest sequence; imbalance that main accepts.
CAP_SLACK = 0.05
BALANCED = 0.05
# Work of a bucket over an even share at which main closes it.
BUCKET_SLACK = 1.1


@dataclass(slots=True)
class Group:
    """Ranks that share sequences."""

    width: int  # number of ranks
    samples: list[int] = field(default_factory=list)  # its sequences, in order
    work: float = 0.0  # of each of its ranks, in main's rounds


def least_width(length: int, capacity: int) -> int:
    """Ranks that a sequence needs at least, a power of two, if a rank holds ``capacity`` tokens."""
    pieces = -(-length // capacity)
    return 1 << max(0, pieces - 1).bit_length()


def falling(lengths: IntArray) -> IntArray:
    """Sequences by falling length, equal ones by index."""
    return np.argsort(-lengths, kind="stable")


def dev_rounds(lengths: IntArray, num_ranks: int, capacity: int) -> list[list[Group]]:
    """Rounds in which every rank has one pack of at most ``capacity`` tokens (``next_hdp_group_packing_aware``, dev).

    Sequences have ``lengths``, none above ``capacity`` times ``num_ranks``, a power of two ``[sequences]``.
    """
    least = np.array([least_width(length, capacity) for length in lengths.tolist()], np.int64)
    left = falling(lengths)
    rounds = []
    while len(left):
        group, widths = _dev_round(lengths[left].astype(np.float64), least[left], num_ranks, float(capacity))
        round_ = [Group(width) for width in filled(widths, num_ranks).tolist()]
        for sample, group_index in zip(left.tolist(), group.tolist(), strict=True):
            if group_index >= 0:
                round_[group_index].samples.append(sample)
        rounds.append(round_)
        left = left[group < 0]
    return rounds


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


def main_rounds(lengths: IntArray, num_ranks: int, capacity: int) -> list[list[Group]]:
    """Groups whose ranks are to be equally busy, sequences one after another in each (``BalancedCPScheduler``, main).

    Arguments as of ``dev_rounds``; a rank's tokens are bounded for each sequence.
    """
    left = falling(lengths).tolist()
    rounds = []
    while left:
        main_round, left = _main_round(left, lengths, num_ranks, capacity)
        rounds.append(main_round)
    return rounds


def _buckets(samples: Sequence[int], lengths: IntArray, capacity: int) -> list[list[int]]:
    """Sequences in consecutive buckets of about equal work, as many as there are widths."""
    widths = [least_width(int(lengths[sample]), capacity) for sample in samples]
    work = [float(lengths[sample]) ** 2 / width for sample, width in zip(samples, widths, strict=True)]
    count = len({*widths})
    target = sum(work) / count
    open_buckets = count
    buckets: list[list[int]] = []
    bucket: list[int] = []
    own_work = 0.0
    for index, sample in enumerate(samples):
        few_left = len(samples) - index <= open_buckets - len(buckets)
        if bucket and (own_work + work[index] > BUCKET_SLACK * target or few_left):
            buckets.append(bucket)
            bucket = []
            own_work = 0.0
            open_buckets = open_buckets - 1
        bucket.append(sample)
        own_work += work[index]
    return [*buckets, bucket]


def _main_round(
    samples: Sequence[int], lengths: IntArray, num_ranks: int, capacity: int
) -> tuple[list[Group], list[int]]:
    """One round of groups, and the sequences that are left."""
    buckets = _buckets(samples, lengths, capacity)
    groups = list[Group]()
    free = num_ranks
    widest = 0
    narrower = False

    def work_of(sample: int) -> float:
        return float(lengths[sample]) ** 2 / least_width(int(lengths[sample]), capacity)

    def spread() -> tuple[float, float]:
        loads = [group.work for group in groups]
        return max(loads), 0.0 if free else min(loads)

    while buckets:
        for bucket in buckets:
            width = least_width(int(lengths[bucket[0]]), capacity)
            fitting = [group for group in groups if group.width == width]
            if fitting or free >= width:
                break
        else:
            break
        widest = widest or width
        if free >= width:
            groups.append(chosen := Group(width))
            free -= width
        else:
            chosen = min(fitting, key=lambda group: group.work)
        chosen.samples.append(sample := bucket.pop(0))
        chosen.work += work_of(sample)
        buckets = [bucket for bucket in buckets if bucket]
        narrower = narrower or width < widest
        most, least = spread()
        if narrower and buckets and most - least <= BALANCED * most:
            break
    left = [sample for bucket in buckets for sample in bucket]
    # The busiest group gives back what it took last while that narrows the spread.
    while True:
        most, least = spread()
        busiest = max(groups, key=lambda group: group.work)
        if most - least <= BALANCED * most or least == 0 or len(busiest.samples) <= 1:
            break
        less = work_of(busiest.samples[-1])
        loads = [group.work - (group is busiest) * less for group in groups]
        if max(loads) - min(loads) >= most - least:
            break
        left.append(busiest.samples.pop())
        busiest.work -= less
    widths = filled(np.array([group.width for group in groups]), num_ranks)
    for group, width in zip(groups, widths.tolist(), strict=True):
        group.width = width
    return groups, left


@dataclass(frozen=True, slots=True)
class GroupsByLength:
    """Groups by LLM tokens alone; each item of a pack is shared by all ranks of its group.

    Attributes:
        scheduler: ``dev`` makes rounds in which every rank has one pack; ``main`` runs every sample alone, one after
            another in its group, and needs PP 1.
        max_tokens: LLM tokens of a rank in a round at most, Megatron-LM's ``max_seqlen_per_dp_cp_rank``; None: what it
            has on average in the rounds of the layout. Raised for a batch whose longest sample needs more on all ranks.
    """

    handles_generators: ClassVar[bool] = True
    handles_widths: ClassVar[bool] = True
    scheduler: Annotated[str, OneOf(("dev", "main"))] = "dev"
    max_tokens: Count | None = None

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Group and round of every unit; ``IncompatibleError`` without widths, or if DP x CP is no power of two."""
        model = profile.job.model
        llm = layout.modules[model.llm_index]
        check_plane(layout, "hybrid_cp", "strategy/planner=hybrid_cp")
        if self.scheduler == "main" and llm.pp > 1:
            raise IncompatibleError(f"layout.pp={llm.pp}: must be 1 with strategy.assigner.scheduler=main")
        if llm.dp & (llm.dp - 1):
            raise IncompatibleError(f"layout: DP x CP is {llm.dp}, must be a power of two, as groups are")
        tokens = np.asarray(shapes.llm_tokens, np.int64)
        capacity = max(self.max_tokens or mean_tokens(profile, layout), -(-int(tokens.max()) // llm.dp))
        choose = dev_rounds if self.scheduler == "dev" else main_rounds
        rounds = number_rounds(choose(tokens, llm.dp, capacity), len(shapes), one_pack=self.scheduler == "dev")
        return round_labels(model, shapes, layout, rounds, spread=False)


def number_rounds(rounds: list[list[Group]], num_samples: int, *, one_pack: bool) -> Rounds:
    """Each group's samples as one pack of its round, or one after another; groups of a round begin together."""
    number, first, width = np.zeros((3, num_samples), np.int64)
    begin = 0
    for groups in rounds:
        starts = first_positions(np.array([group.width for group in groups])).tolist()
        for group, start in zip(groups, starts, strict=True):
            number[group.samples] = begin + np.arange(len(group.samples)) * (not one_pack)
            first[group.samples] = start
            width[group.samples] = group.width
        begin += 1 if one_pack else max(len(group.samples) for group in groups)
    return Rounds(number, first, width)
