"""Orders of a program's actions that its dependencies and all its lanes agree with."""

from __future__ import annotations

import numpy as np

from entrain_bench.arithmetic import matmul
from entrain_bench.arrays import IntArray, offsets_from_counts, rows_of, sum_rows, take_rows
from entrain_bench.program import Program

# Model FLOPs that count as one unit of work: far less than any pass takes, and 2^63 of them are enough for all.
FLOPS_PER_UNIT = 1e6


def order_of_actions(program: Program) -> IntArray:
    """Place of each action in one order of all, the same on every rank ``[actions]``.

    Actions come in the order in which they would end if work alone took time, equal ones by their numbers. So a message
    whose sender comes before an action is likely to arrive while that runs, and one whose sender comes after it is not.
    """
    work = work_of_actions(program)
    order = np.empty(program.num_actions, np.int64)
    order[np.argsort(positions_of_actions(program, work) + work, kind="stable")] = np.arange(program.num_actions)
    return order


def positions_of_actions(program: Program, work: IntArray | None = None) -> IntArray:
    """Work of the longest chain of actions that must end before each action starts ``[actions]``.

    Args:
        program: the program.
        work: of each action, positive ``[actions]``; None: 1, so that actions are counted.
    """
    lane, action = rows_of(program.lane_offsets), program.lane_actions
    follows = lane[1:] == lane[:-1]
    before = np.concatenate([program.dep_actions, action[:-1][follows]])
    after = np.concatenate([rows_of(program.dep_offsets), action[1:][follows]])
    order = np.argsort(before, kind="stable")
    offsets, after = offsets_from_counts(np.bincount(before, minlength=program.num_actions)), after[order]
    missing = np.bincount(after, minlength=program.num_actions)
    work = np.ones(program.num_actions, np.int64) if work is None else work
    position = np.zeros(program.num_actions, np.int64)
    ready = np.flatnonzero(missing == 0)
    while len(ready):
        own, edges = take_rows(offsets, ready)
        freed = after[edges]
        np.maximum.at(position, freed, np.repeat(position[ready] + work[ready], np.diff(own)))
        np.subtract.at(missing, freed, 1)
        ready = np.unique(freed[missing[freed] == 0])
    return position


def work_of_actions(program: Program) -> IntArray:
    """Model FLOPs of each action on one of its ranks, in units of ``FLOPS_PER_UNIT``, at least 1 ``[actions]``.

    A backward has twice those of its forward, with its weight pass.
    """
    flops = np.zeros(program.num_actions)
    for index, (module, placed) in enumerate(zip(program.model.modules, program.layout.modules, strict=True)):
        chunks = program.chunks[index]
        lengths = module.lengths(program.shapes, chunks.members)
        of_kinds = [sum_rows(chunks.offsets, kind.forward_flops(lengths)) for kind in module.kinds]
        counts = module.kind_counts(placed.layers_per_stage)
        forward = matmul(np.stack(of_kinds, axis=1), counts.T) / (placed.tp * placed.cp)
        splits = program.splits_backward(index)
        flops[program.forward_actions(index)] = forward
        flops[program.backward_actions(index)] = forward if splits else 2 * forward
        if splits:
            flops[program.weight_actions(index)] = forward
    return np.maximum(flops / FLOPS_PER_UNIT, 1).astype(np.int64)
