"""An order of a program's actions that its dependencies and all its lanes agree with."""

from __future__ import annotations

import numpy as np

from entrain_bench.arrays import IntArray, offsets_from_counts, rows_of, take_rows
from entrain_bench.program import Program


def positions_of_actions(program: Program) -> IntArray:
    """Longest chain of actions that must end before each action starts ``[actions]``."""
    lane, action = rows_of(program.lane_offsets), program.lane_actions
    follows = lane[1:] == lane[:-1]
    before = np.concatenate([program.dep_actions, action[:-1][follows]])
    after = np.concatenate([rows_of(program.dep_offsets), action[1:][follows]])
    order = np.argsort(before, kind="stable")
    offsets, after = offsets_from_counts(np.bincount(before, minlength=program.num_actions)), after[order]
    missing = np.bincount(after, minlength=program.num_actions)
    position = np.zeros(program.num_actions, np.int64)
    ready, level = np.flatnonzero(missing == 0), 0
    while len(ready):
        position[ready] = level
        freed = after[take_rows(offsets, ready)[1]]
        np.subtract.at(missing, freed, 1)
        ready, level = np.unique(freed[missing[freed] == 0]), level + 1
    return position
