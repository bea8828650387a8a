"""The compiled loop that times a program: lanes run their actions in order, each as soon as its inputs are there."""

from __future__ import annotations

import numpy as np
from numba import njit

from entrain_bench.arrays import BoolArray, FloatArray, IntArray, rows_of
from entrain_bench.errors import DeadlockError
from entrain_bench.program import Program


def place_actions(
    program: Program, duration_s: FloatArray, delay_s: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Earliest start and end of every action, and how long each waited for transfers alone ``[actions]``.

    Raises:
        DeadlockError: naming the cycle of lanes that wait for each other.
    """
    start, end, wait, position = _sweep(
        program.lane_offsets.astype(np.int64),
        program.lane_actions.astype(np.int32),
        program.num_lanes.astype(np.int32),
        program.dep_offsets.astype(np.int64),
        program.dep_actions.astype(np.int32),
        duration_s,
        delay_s,
    )
    if np.any(position < np.diff(program.lane_offsets)):
        raise DeadlockError(_describe_cycle(program, position, ~np.isnan(end)))
    return start, end, wait


@njit(cache=True)
def _sweep(lane_offsets, lane_actions, num_lanes, dep_offsets, dep_actions, duration, delay):  # type: ignore[no-untyped-def]
    """Advance lanes until all are done or stuck; O(actions + dependencies).

    A lane that cannot go on is parked: on the action it needs (which wakes it when it ends), or, if its next action
    occupies several lanes and others are still busy, on that action. The last lane to arrive runs it for all.
    """
    lanes, actions = len(lane_offsets) - 1, len(num_lanes)
    start, end, wait = np.full(actions, np.nan), np.full(actions, np.nan), np.zeros(actions)
    arrived = np.zeros(actions, np.int32)
    lane_free_of_action = np.zeros(actions)
    parked = np.full(actions, -1, np.int32)
    next_parked = np.full(lanes, -1, np.int32)
    position = np.zeros(lanes, np.int64)
    counted = np.full(lanes, -1, np.int32)
    cursor = np.zeros(lanes, np.int64)
    lane_free = np.zeros(lanes)
    stack = np.arange(lanes - 1, -1, -1)
    top = lanes
    while top:
        top -= 1
        lane = stack[top]
        while position[lane] < lane_offsets[lane + 1] - lane_offsets[lane]:
            action = lane_actions[lane_offsets[lane] + position[lane]]
            if counted[lane] != action:
                counted[lane] = action
                cursor[lane] = dep_offsets[action]
                arrived[action] += 1
                lane_free_of_action[action] = max(lane_free_of_action[action], lane_free[lane])
                if arrived[action] < num_lanes[action]:
                    next_parked[lane] = parked[action]
                    parked[action] = lane
                    break
            blocker = -1
            while cursor[lane] < dep_offsets[action + 1]:
                needed = dep_actions[cursor[lane]]
                if np.isnan(end[needed]):
                    blocker = needed
                    break
                cursor[lane] += 1
            if blocker >= 0:
                next_parked[lane] = parked[blocker]
                parked[blocker] = lane
                break
            computed = lane_free_of_action[action]
            begin = computed
            for edge in range(dep_offsets[action], dep_offsets[action + 1]):
                done = end[dep_actions[edge]]
                computed = max(computed, done)
                begin = max(begin, done + delay[edge])
            start[action] = begin
            end[action] = begin + duration[action]
            wait[action] = begin - computed
            lane_free[lane] = end[action]
            position[lane] += 1
            waiting = parked[action]
            while waiting >= 0:
                # A lane parked here either shares the action or waits for its result.
                if counted[waiting] == action:
                    lane_free[waiting] = end[action]
                    position[waiting] += 1
                stack[top] = waiting
                top += 1
                waiting = next_parked[waiting]
    return start, end, wait, position


def _describe_cycle(program: Program, position: IntArray, done: BoolArray) -> str:
    """Follow stuck lanes, each to a lane it waits for, until one repeats."""
    sizes = np.diff(program.lane_offsets)
    lane_of_entry = rows_of(program.lane_offsets)
    first = int(np.flatnonzero(position < sizes)[0])
    path: list[int] = []
    notes: dict[int, str] = {}
    lane = first
    while lane not in path:
        path.append(lane)
        action = int(program.lane_actions[program.lane_offsets[lane] + position[lane]])
        needs = program.dep_actions[program.dep_offsets[action] : program.dep_offsets[action + 1]]
        missing = needs[~done[needs]]
        target = int(missing[0]) if missing.size else action
        holders = lane_of_entry[program.lane_actions == target]
        behind = [
            int(h)
            for h in holders
            if program.lane_actions[program.lane_offsets[h] + position[h]] != target or missing.size
        ]
        if not behind:
            return f"program: {program.view(action)} waits for {program.view(target)}, which no lane runs"
        rank = int(program.layout.lane_first_rank[lane])
        notes[lane] = f"rank {rank} at {program.view(action)} needs {program.view(target)}"
        lane = behind[0]
    cycle = [notes[member] for member in path[path.index(lane) :]]
    return "program: deadlock, a cycle of waits: " + "; ".join(cycle)
