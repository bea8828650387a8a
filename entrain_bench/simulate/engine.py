"""The compiled loop that times a program: lanes run their actions in order, each as soon as its inputs are there."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
from numba import njit

from entrain_bench.arrays import BoolArray, FloatArray, IntArray, rows_of
from entrain_bench.costs.relay import Relay
from entrain_bench.errors import DeadlockError
from entrain_bench.program import Program


def place_actions(
    program: Program, duration_s: FloatArray, delay_s: FloatArray, relay: Relay | None = None
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Earliest start and end of every action, and how long each waited for transfers alone ``[actions]``.

    Args:
        program: what to place.
        duration_s: of each action ``[actions]``.
        delay_s: of each dependency ``[dependencies]``; 0 for those the relay carries.
        relay: transfers that share one rank's link, served in the order in which they become ready.

    Raises:
        DeadlockError: naming the cycle of lanes that wait for each other.
    """
    start, end, wait, position = _sweep(program.num_actions, *_columns(program, duration_s, delay_s, relay))
    position = position[: program.layout.num_lanes]
    if np.any(position < np.diff(program.lane_offsets)):
        raise DeadlockError(_describe_cycle(program, relay, position, ~np.isnan(end)))
    return start, end, wait


def _columns(
    program: Program, duration_s: FloatArray, delay_s: FloatArray, relay: Relay | None
) -> tuple[IntArray | FloatArray, ...]:
    """The arrays ``_sweep`` needs: the program's columns, and below them a lane, action and row for each transfer.

    ``carriers`` holds what each dependency's data arrive with: the action waited for, or the transfer. A transfer waits
    for the sources of all dependencies it carries.
    """
    lane_offsets, lane_actions = program.lane_offsets, program.lane_actions
    num_lanes, dep_offsets, dep_actions = program.num_lanes, program.dep_offsets, program.dep_actions
    carriers = dep_actions
    if relay is not None:
        count = len(relay.link_s)
        transfers = program.num_actions + np.arange(count)
        lane_offsets = np.append(lane_offsets, lane_offsets[-1] + np.arange(1, count + 1))
        lane_actions = np.append(lane_actions, transfers)
        num_lanes = np.append(num_lanes, np.ones(count, np.int64))
        carried = np.flatnonzero(relay.transfer >= 0)
        number = relay.transfer[carried]
        sources = dep_actions[carried[np.argsort(number, kind="stable")]]
        carriers = np.append(np.where(relay.transfer >= 0, program.num_actions + relay.transfer, dep_actions), sources)
        dep_offsets = np.append(dep_offsets, dep_offsets[-1] + np.cumsum(np.bincount(number, minlength=count)))
        dep_actions = np.append(dep_actions, sources)
        duration_s = np.append(duration_s, relay.link_s)
        delay_s = np.append(delay_s, np.zeros(len(sources)))
    return (
        lane_offsets.astype(np.int64),
        lane_actions.astype(np.int32),
        num_lanes.astype(np.int32),
        dep_offsets.astype(np.int64),
        dep_actions.astype(np.int32),
        carriers.astype(np.int32),
        duration_s,
        delay_s,
    )


@njit(cache=True)
def _sweep(  # type: ignore[no-untyped-def]
    first_transfer, lane_offsets, lane_actions, num_lanes, dep_offsets, dep_actions, carriers, duration, delay
):
    """Advance lanes until all are done or stuck; O(actions + dependencies), and a heap of transfers.

    A lane that cannot go on is parked: on the action it needs (which wakes it when it ends), or, if its next action
    occupies several lanes and others are still busy, on that action. The last lane to arrive runs it for all.

    Transfers queue for the link. When no lane can go on, all that is not placed yet waits for one of them, so none can
    become ready before the earliest in the queue: serving that one keeps to the order of readiness.
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
    queue = [(0.0, np.int32(0)) for _ in range(0)]
    received = sent = 0.0
    stack = np.arange(lanes - 1, -1, -1)
    top = lanes
    while top or queue:
        if not top:
            ready, transfer = heappop(queue)
            received = max(received, ready) + duration[transfer]
            sent = max(sent, received) + duration[transfer]
            end[transfer] = sent
            top = _wake(transfer, parked, next_parked, stack, top)
            continue
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
            elif not np.isnan(end[action]):
                # Another lane has run it for both.
                lane_free[lane] = end[action]
                position[lane] += 1
                continue
            blocker = -1
            while cursor[lane] < dep_offsets[action + 1]:
                needed = carriers[cursor[lane]]
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
                computed = max(computed, end[dep_actions[edge]])
                begin = max(begin, end[carriers[edge]] + delay[edge])
            if action >= first_transfer:
                heappush(queue, (begin, action))
                break
            start[action] = begin
            end[action] = begin + duration[action]
            wait[action] = begin - computed
            lane_free[lane] = end[action]
            position[lane] += 1
            top = _wake(action, parked, next_parked, stack, top)
    return start[:first_transfer], end[:first_transfer], wait[:first_transfer], position


@njit(cache=True)
def _wake(action, parked, next_parked, stack, top):  # type: ignore[no-untyped-def]
    """Put the lanes parked on an action on the stack; returns its new top."""
    waiting = parked[action]
    while waiting >= 0:
        stack[top] = waiting
        top += 1
        waiting = next_parked[waiting]
    return top


def _describe_cycle(program: Program, relay: Relay | None, position: IntArray, done: BoolArray) -> str:
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
        needs = _inputs(program, relay, action)
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


def _inputs(program: Program, relay: Relay | None, action: int) -> IntArray:
    """Actions that one waits for: those it depends on, then all others whose data share a transfer with its own."""
    row = slice(program.dep_offsets[action], program.dep_offsets[action + 1])
    needs = program.dep_actions[row]
    if relay is None:
        return needs
    mine = np.unique(relay.transfer[row])
    return np.append(needs, program.dep_actions[np.isin(relay.transfer, mine[mine >= 0])])
