"""Why a program does not end: the cycle of ranks that wait for each other, in words."""

from __future__ import annotations

import numpy as np

from entrain_bench.base.arrays import BoolArray, IntArray, rows_of
from entrain_bench.costs.transfers import LinkTransfers
from entrain_bench.program import Program


def describe_deadlock(
    program: Program,
    transfers: LinkTransfers | None,
    position: IntArray,
    done: BoolArray,
    together: IntArray | None = None,
) -> str:
    """Follow stuck lanes, each to a lane it waits for, until one repeats.

    ``position`` counts the actions that each lane ran ``[lanes]``; ``done`` and ``together`` (as ``Prices`` has it) are
    ``[actions]``.
    """

    def next_action(lane: int) -> int:
        return int(program.lane_actions[program.lane_offsets[lane] + position[lane]])

    lane_of_entry = rows_of(program.lane_offsets)
    lane = int(np.flatnonzero(position < np.diff(program.lane_offsets))[0])
    waits: dict[int, str] = {}
    while lane not in waits:
        action = next_action(lane)
        inputs = _inputs(program, transfers, action)
        missing = inputs[~done[inputs]]
        needed = int(missing[0]) if missing.size else action
        holders = lane_of_entry[program.lane_actions == needed].tolist()
        if not missing.size:
            # Nothing but the action's other lanes: those that have not come to it.
            holders = [holder for holder in holders if next_action(holder) != needed]
        if not missing.size and not holders and together is not None and together[action] >= 0:
            # One that begins together with it, and has another before it.
            heads = {next_action(one) for one in np.flatnonzero(position < np.diff(program.lane_offsets)).tolist()}
            others = [peer for peer in np.flatnonzero(together == together[action]).tolist() if peer not in heads]
            needed = others[0] if others else action
            holders = lane_of_entry[program.lane_actions == needed].tolist()
        if not holders:
            return f"program: {program.view(action)} waits for {program.view(needed)}, which no lane runs"
        rank = int(program.layout.lane_first_rank[lane])
        waits[lane] = f"rank {rank} at {program.view(action)} needs {program.view(needed)}"
        lane = holders[0]
    cycle = list(waits.values())[list(waits).index(lane) :]
    return "program: deadlock, a cycle of waits: " + "; ".join(cycle)


def _inputs(program: Program, transfers: LinkTransfers | None, action: int) -> IntArray:
    """Actions that one waits for: those it depends on, then all others whose data share a transfer with its own."""
    row = slice(program.dep_offsets[action], program.dep_offsets[action + 1])
    needs = program.dep_actions[row]
    if transfers is None:
        return needs
    mine = np.unique(transfers.first[row])
    return np.append(needs, program.dep_actions[np.isin(transfers.first, mine[mine >= 0])])
