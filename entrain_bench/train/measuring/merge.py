"""One timeline out of what the ranks measured; the simulator's format, so metrics and figures need not know."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from entrain_bench.base.arrays import FloatArray, rows_of
from entrain_bench.program import Pass, Program
from entrain_bench.program.timeline import Timeline
from entrain_bench.train.messages.places import lane_of_rank


def merge_timeline(program: Program, rows: Sequence[FloatArray], peak_bytes: Sequence[float]) -> Timeline:
    """Merge action, start and end of every action of each rank ``[ranks][actions, 3]``.

    An action of several ranks starts when the last of them starts, for they wait for each other inside. Collective
    communication is known separately for gradient synchronisation only. An action waited for a transfer from the moment
    its ranks were free and its inputs computed.
    """
    start, end = np.full((2, program.num_actions), -np.inf)
    for own in rows:
        action = own[:, 0].astype(np.int64)
        np.maximum.at(start, action, own[:, 1])
        np.maximum.at(end, action, own[:, 2])
    comm = np.where(program.kind == Pass.GRAD_SYNC, end - start, 0.0)
    peak = np.zeros(program.layout.num_lanes)
    for rank, need in enumerate(peak_bytes):
        lane_index = lane_of_rank(program.layout, rank)
        if lane_index is not None:
            peak[lane_index] = max(peak[lane_index], need)
    ready = np.zeros(program.num_actions)
    np.maximum.at(ready, rows_of(program.dep_offsets), end[program.dep_actions])
    lane, action = rows_of(program.lane_offsets), program.lane_actions
    follows = lane[1:] == lane[:-1]
    np.maximum.at(ready, action[1:][follows], end[action[:-1][follows]])
    waited = np.where(np.diff(program.dep_offsets) > 0, np.maximum(start - ready, 0.0), 0.0)
    return Timeline(program, start, end, comm, waited, peak)
