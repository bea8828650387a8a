"""FlexSP's program of a microbatch: which groups of ranks there are, and which sequences each has.

Makespan of the slowest group, under memory, with widths that sum to at most all ranks. The greedy packing of
``balancing.rank_groups`` answers first; the paper's mixed-integer program over buckets of lengths improves it.
"""

from __future__ import annotations

import numpy as np
from ortools.sat.python import cp_model

from entrain_bench.balancing.rank_groups import GOOD, SequenceGroups, measured
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import FloatArray, IntArray

from .cutting import bucketed

# Seconds and bytes as the integer program counts them: shares of the greedy makespan and of the room.
UNITS = 10_000


def solved(
    start: SequenceGroups,
    seconds: FloatArray,
    bytes_: FloatArray,
    widths: IntArray,
    num_ranks: int,
    room: float,
    num_buckets: int,
    work: float,
) -> SequenceGroups:
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
