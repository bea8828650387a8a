"""Groups of widths that follow lengths: FlexSP, and dynamic context parallelism of Megatron-LM.

FlexSP (arXiv:2412.01523) has sharded weights. The greedy packing of ``balancing.rank_groups`` answers first; the
paper's mixed-integer program over buckets of lengths improves it. In Megatron-LM's dev branch
(``--dynamic-context-parallel``) each round of a batch has groups of its own over the DP x CP plane, wide for long
samples. Here groups are placed by falling width, so they are aligned; Megatron-LM places them as opened.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np
from ortools.sat.python import cp_model

from entrain_bench.balancing.lpt import next_fit
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.rank_groups import (
    GOOD,
    SequenceGroups,
    first_positions,
    grouped,
    measured,
    room_bytes,
    sample_costs,
)
from entrain_bench.balancing.rounds import Rounds, check_plane, mean_tokens, round_labels
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.compiled import njit
from entrain_bench.base.errors import IncompatibleError, OutOfMemoryError
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.parse import Count, at_least
from entrain_bench.specs.shapes import SampleShapes

# Seconds and bytes as the integer program counts them: shares of the greedy makespan and of the room.
UNITS = 10_000
# Numbers of microbatches to try, from the least that fits memory; buckets of sequences of similar time in a program.
TRIALS = 5
BUCKETS = 16


def blasted(size: FloatArray, count: int) -> IntArray:
    """Microbatch of each sequence: ``count`` consecutive ones whose largest sum is least (appendix A)."""
    whole = np.rint(size).astype(np.int64)
    order = np.arange(len(whole))
    low = int(whole.max(initial=0))
    high = int(whole.sum())
    while low < high:
        middle = (low + high) // 2
        if next_fit(whole, order, middle)[-1] < count:
            high = middle
        else:
            low = middle + 1
    return np.asarray(next_fit(whole, order, high))


def bucketed(rising: IntArray, count: int) -> IntArray:
    """Bucket of each rising value so that rounding up to the largest of its bucket adds least ``[values]``.

    ``error[k][q] = min over j of error[j][q - 1] + sum over j < i <= k of (s_k - s_i)``; of equal cuts the first.
    """
    distinct, which, number = np.unique(rising, return_inverse=True, return_counts=True)
    if len(distinct) <= count:
        return np.asarray(which.ravel(), np.int64)
    below = np.append(0.0, np.cumsum(number))
    total = np.append(0.0, np.cumsum(number * distinct))
    largest = np.append(0.0, distinct)
    added = (below - below[:, None]) * largest - (total - total[:, None])
    added[np.tril_indices(len(below))] = np.inf
    error = np.where(below == 0, 0.0, np.inf)
    cuts = []
    for _ in range(count):
        longer = error[:, None] + added
        cuts.append(longer.argmin(axis=0))
        error = longer.min(axis=0)
    bucket = np.zeros(len(distinct), np.int64)
    end = len(distinct)
    for label in range(count - 1, -1, -1):
        begin = cuts[label][end]
        bucket[begin:end] = label
        end = begin
    return np.asarray(bucket[which.ravel()])


def solved(
    start: SequenceGroups, seconds: FloatArray, bytes_: FloatArray, limits: tuple[IntArray, int, float], work: float
) -> SequenceGroups:
    """Return the better of ``start`` and the mixed-integer program's result in CP-SAT's time; see ``grouped``."""
    widths, num_ranks, room = limits
    floor = max(float(seconds.min(axis=0).max()), float((seconds * widths[:, None]).min(axis=0).sum()) / num_ranks)
    if start.makespan_s <= GOOD * floor or work <= 0:
        return start
    order = np.argsort(decisive(seconds[0]), kind="stable")
    unit = start.makespan_s / UNITS
    bucket = np.empty(len(order), np.int64)
    bucket[order] = bucketed(np.ceil(seconds[0, order] / unit).astype(np.int64), BUCKETS)
    count = np.bincount(bucket)
    members = [np.flatnonzero(bucket == index) for index in range(len(count))]
    # A bucket counts as its largest sequence.
    cost = np.stack([np.ceil(seconds[:, mine].max(axis=1) / unit) for mine in members], axis=1).astype(np.int64)
    held = np.array([np.ceil(bytes_[mine].max() / room * UNITS) for mine in members], np.int64)
    model = cp_model.CpModel()
    makespan = model.new_int_var(0, UNITS, "")
    taken: list[tuple[int, list[cp_model.IntVar]]] = []
    chosen: list[tuple[int, cp_model.IntVar]] = []
    for level, width in enumerate(widths.tolist()):
        before = None
        for _ in range(num_ranks // width):
            selected = model.new_bool_var("")
            counts = [model.new_int_var(0, int(most), "") for most in count]
            model.add(cp_model.LinearExpr.weighted_sum(counts, cost[level].tolist()) <= makespan)
            model.add(cp_model.LinearExpr.weighted_sum(counts, held.tolist()) <= UNITS * width)
            for variable, most in zip(counts, count.tolist(), strict=True):
                model.add(variable <= most * selected)
            if before is not None:
                model.add_implication(selected, before)
            before = selected
            taken.append((width, counts))
            chosen.append((width, selected))
    for groups, most in enumerate(count.tolist()):
        model.add(sum(counts[groups] for _, counts in taken) == most)
    model.add(sum(width * selected for width, selected in chosen) <= num_ranks)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = work
    solver.parameters.relative_gap_limit = GOOD - 1
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return start
    width = []
    group = np.zeros(len(bucket), np.int64)
    next_of = [0] * len(count)
    for groups, counts in taken:
        values = [solver.value(variable) for variable in counts]
        if not any(values):
            continue
        for index, value in enumerate(values):
            group[members[index][next_of[index] : next_of[index] + value]] = len(width)
            next_of[index] += value
        width.append(groups)
    solution = measured(np.array(width), group, seconds, widths)
    return solution if decisive(solution.makespan_s) < decisive(start.makespan_s) else start


@dataclass(frozen=True, slots=True)
class FlexibleGroups:
    """Microbatches of consecutive lengths, each with the groups that are through first.

    Attributes:
        solver_work: for each microbatch, in CP-SAT's deterministic time (about seconds); 0: the greedy groups alone.
    """

    handles_generators: ClassVar[bool] = True
    handles_widths: ClassVar[bool] = True
    packs: ClassVar[bool] = True
    solver_work: Annotated[float, at_least(0)] = 0.05

    def draft(self) -> FlexibleGroups:
        """Without integer programs."""
        return replace(self, solver_work=0.0)

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Group and microbatch; ``IncompatibleError`` for stages, ``OutOfMemoryError`` for samples beyond memory."""
        model = profile.job.model
        llm = layout.modules[model.llm_index]
        check_plane(layout, "flexsp", "strategy/planner=flexsp")
        if llm.pp > 1:
            raise IncompatibleError(f"layout.pp={llm.pp}: must be 1 with strategy/assigner=flexsp")
        widths = np.array([cp for _, cp in llm.degrees])
        seconds, bytes_, _ = sample_costs(shapes, layout, profile, spread=True)
        room = room_bytes(layout, profile)
        limits = widths, llm.dp, room
        if room <= 0 or bytes_.max() > room * widths[-1]:
            raise OutOfMemoryError(
                f"assignment: the longest of {len(shapes)} samples does not fit on {widths[-1]} ranks"
            )
        order = np.argsort(shapes.llm_tokens, kind="stable")
        least = int(np.ceil(decisive(float(bytes_.sum()) / (room * llm.dp))))
        best: list[tuple[IntArray, SequenceGroups]] = []
        best_s = np.inf
        count = least
        last = least + TRIALS
        while count <= len(shapes) and (count < last or not best):
            microbatches = greedy_microbatches(order, count, seconds, bytes_, limits)
            total_s = decisive(sum(groups.makespan_s for _, groups in microbatches)) if microbatches else np.inf
            if total_s < best_s:
                best = microbatches
                best_s = total_s
            count += 1
        if not best:
            raise OutOfMemoryError(
                f"assignment: {len(shapes)} samples do not fit on {llm.dp} ranks in any number of microbatches; a rank "
                f"has {room:.3g} bytes for activations, and the samples take {bytes_.sum():.3g}"
            )
        number, first, width = np.zeros((3, len(shapes)), np.int64)
        for index, (mine, start) in enumerate(best):
            groups = solved(start, seconds[:, mine], bytes_[mine], limits, self.solver_work)
            begin = first_positions(groups.width)
            number[mine] = index
            first[mine] = begin[groups.group]
            width[mine] = groups.width[groups.group]
        return round_labels(model, shapes, layout, Rounds(number, first, width), spread=True)


def greedy_microbatches(
    order: IntArray, count: int, seconds: FloatArray, bytes_: FloatArray, limits: tuple[IntArray, int, float]
) -> list[tuple[IntArray, SequenceGroups]]:
    """Return samples and greedy groups of each of ``count`` microbatches; none if some exceed memory."""
    microbatch = blasted(bytes_[order], count)
    microbatches = []
    for number in range(int(microbatch.max()) + 1):
        mine = order[microbatch == number]
        groups = grouped(seconds[:, mine], bytes_[mine], *limits)
        if groups is None:
            return []
        microbatches.append((mine, groups))
    return microbatches


# By how much a rank may exceed the work of one that is full of the longest sequence.
CAP_SLACK = 0.05


def dev_rounds(lengths: IntArray, num_ranks: int, capacity: int) -> Rounds:
    """Rounds in which every rank has one pack of at most ``capacity`` tokens (``next_hdp_group_packing_aware``)."""
    # Ranks that a sequence needs at least, a power of two.
    least = np.array([1 << max(0, -(-length // capacity) - 1).bit_length() for length in lengths.tolist()], np.int64)
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
    """Return widths that use all ranks: the first of the narrowest groups doubles repeatedly."""
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
        max_tokens: LLM tokens of a rank in a round at most, Megatron-LM's ``max_seqlen_per_dp_cp_rank``; None: the
            average in the rounds of the layout. Raised for a batch whose longest sample needs more on all ranks.
    """

    handles_generators: ClassVar[bool] = True
    handles_widths: ClassVar[bool] = True
    packs: ClassVar[bool] = True
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
