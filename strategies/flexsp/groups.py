"""FlexSP's planner of a microbatch: which groups of ranks there are, and which sequences each has.

Makespan of the slowest group, under memory, with widths that sum to at most all ranks. A greedy packing, by bisection
over the makespan, answers first; the paper's mixed-integer program over buckets of lengths improves it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.compiled import njit

from .cutting import bucketed

# Halvings of the interval in which the greedy makespan lies, and its share of the lower bound that is good enough.
BISECTIONS, GOOD = 30, 1.01
# Seconds and bytes as the integer program counts them: shares of the greedy makespan and of the room.
UNITS = 10_000


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of a microbatch.

    Attributes:
        width: ranks of each ``[groups]``.
        group: of each sequence ``[sequences]``.
        makespan_s: of the slowest group.
    """

    width: IntArray
    group: IntArray
    makespan_s: float


def grouped(seconds: FloatArray, bytes_: FloatArray, widths: IntArray, num_ranks: int, room: float) -> Groups | None:
    """Groups whose slowest is fast, without a solver; None if the sequences do not fit in memory.

    For a makespan, sequences by falling time take the first group, narrow ones first, that has time and memory for
    them, or open one of the least width at which they have both.

    Args:
        seconds: that a sequence takes on a group of each width ``[widths, sequences]``.
        bytes_: of a sequence, which its group shares ``[sequences]``.
        widths: rising powers of two ``[widths]``.
        num_ranks: of all groups together at most.
        room: bytes of a rank.
    """
    order = np.argsort(-decisive(seconds[0]), kind="stable")
    alone = np.where(bytes_ <= room * widths[:, None], decisive(seconds), np.inf)
    low = max(float(alone.min(axis=0).max()), float((alone * widths[:, None]).min(axis=0).sum()) / num_ranks)
    if not np.isfinite(low):
        return None
    best, high = None, low
    for _ in range(BISECTIONS):
        best = _packed(seconds, bytes_, widths, num_ranks, room, high, order)
        if best[1][0]:
            break
        low, high = high, 2 * high
    if best is None or not best[1][0]:
        return None
    for _ in range(BISECTIONS if high > low else 0):
        if high <= low * (GOOD**0.1):
            break
        middle = (low + high) / 2
        found = _packed(seconds, bytes_, widths, num_ranks, room, middle, order)
        if found[1][0]:
            best, high = found, middle
        else:
            low = middle
    group, width = best
    return _measured(width, group, seconds, widths)


def _measured(width: IntArray, group: IntArray, seconds: FloatArray, widths: IntArray) -> Groups:
    own = seconds[np.searchsorted(widths, width[group]), np.arange(len(group))]
    return Groups(width, group, float(np.bincount(group, own).max(initial=0.0)))


@njit()
def _packed(seconds, bytes_, widths, num_ranks, room, most_s, order):  # type: ignore[no-untyped-def]
    """Group of each sequence and widths of groups; the first width is 0 if there is no room for all."""
    group = np.zeros(len(order), np.int64)
    width, level = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    load, held = np.zeros(num_ranks), np.zeros(num_ranks)
    count, free, limit = 0, num_ranks, most_s * (1 + 1e-9)
    for sequence in order:
        best = -1
        for own in range(count):
            if best >= 0 and width[own] >= width[best]:
                continue
            fits = held[own] + bytes_[sequence] / width[own] <= room
            if fits and load[own] + seconds[level[own], sequence] <= limit:
                best = own
        if best < 0:
            for each in range(len(widths)):
                if widths[each] > free:
                    break
                if seconds[each, sequence] <= limit and bytes_[sequence] / widths[each] <= room:
                    best = count
                    width[count], level[count] = widths[each], each
                    count, free = count + 1, free - widths[each]
                    break
        if best < 0:
            width[0] = 0
            return group, width[: max(count, 1)].copy()
        group[sequence] = best
        load[best] += seconds[level[best], sequence]
        held[best] += bytes_[sequence] / width[best]
    return group, width[:count].copy()


def solved(
    start: Groups,
    seconds: FloatArray,
    bytes_: FloatArray,
    widths: IntArray,
    num_ranks: int,
    room: float,
    num_buckets: int,
    work: float,
) -> Groups:
    """The better of ``start`` and what the mixed-integer program over buckets finds within its work.

    Args:
        start: groups to improve.
        seconds: as of ``grouped``.
        bytes_: likewise.
        widths: likewise.
        num_ranks: likewise.
        room: likewise.
        num_buckets: buckets of sequences with about the same time.
        work: of the solver, in CP-SAT's deterministic time (about seconds).
    """
    floor = max(float(seconds.min(axis=0).max()), float((seconds * widths[:, None]).min(axis=0).sum()) / num_ranks)
    if start.makespan_s <= GOOD * floor or work <= 0:
        return start
    order = np.argsort(decisive(seconds[0]), kind="stable")
    unit = start.makespan_s / UNITS
    bucket = np.empty(len(order), np.int64)
    bucket[order] = bucketed(np.ceil(seconds[0, order] / unit).astype(np.int64), num_buckets)
    count = np.bincount(bucket)
    members = [np.flatnonzero(bucket == each) for each in range(len(count))]
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
            own = [model.new_int_var(0, int(most), "") for most in count]
            model.add(cp_model.LinearExpr.weighted_sum(own, cost[level].tolist()) <= makespan)
            model.add(cp_model.LinearExpr.weighted_sum(own, held.tolist()) <= UNITS * width)
            for variable, most in zip(own, count.tolist(), strict=True):
                model.add(variable <= most * selected)
            if before is not None:
                model.add_implication(selected, before)
            before = selected
            taken.append((width, own))
            chosen.append((width, selected))
    for each, most in enumerate(count.tolist()):
        model.add(sum(own[each] for _, own in taken) == most)
    model.add(sum(width * selected for width, selected in chosen) <= num_ranks)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = work
    solver.parameters.relative_gap_limit = GOOD - 1
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return start
    width, group, next_of = [], np.zeros(len(bucket), np.int64), [0] * len(count)
    for each, own in taken:
        values = [solver.value(variable) for variable in own]
        if not any(values):
            continue
        for index, value in enumerate(values):
            group[members[index][next_of[index] : next_of[index] + value]] = len(width)
            next_of[index] += value
        width.append(each)
    found = _measured(np.array(width), group, seconds, widths)
    return found if decisive(found.makespan_s) < decisive(start.makespan_s) else start
