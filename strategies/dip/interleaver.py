"""DIP's greedy dual-queue interleaver (arXiv:2504.14145) as a compiled list scheduler that cannot deadlock.

Every lane has a queue of forwards and one of backwards whose inputs are there. Time advances by always taking the lane
that can start soonest. If both its queues hold an action that could have started when its last one ended, forward and
backward alternate; otherwise the action that starts first fills the bubble.

Memory. Stopping forwards on a full lane alone deadlocks: forwards of late microbatches may take the room that an early
one needs to reach its backward. Chunks that depend on each other form a *group* (a microbatch with its encoders'
sub-microbatches), and groups have one order for all lanes. A forward is admitted on a lane if everything that the open
groups up to its own hold there and will hold fits together. So the earliest open group is never refused on any lane and
some action can always run, and if every group fits by itself, nothing exceeds the room.
"""

from __future__ import annotations

import numpy as np
from numba import njit

FORWARD = 0


@njit(cache=True)
def _last_admitted(lane, room, first_open, group_held, group_due):  # type: ignore[no-untyped-def]
    """The last group whose forwards may start: with all that open groups up to it still need, the lane is not full."""
    num_groups = group_held.shape[1]
    group, reserved = first_open[lane], 0
    while group < num_groups:
        reserved += group_held[lane, group] + group_due[lane, group]
        if reserved > room[lane]:
            break
        group += 1
    # The earliest open group waits for its own backwards at most.
    return max(group - 1, first_open[lane])


@njit(cache=True)
def _better(begin, priority, best_begin, best_priority):  # type: ignore[no-untyped-def]
    return begin < best_begin or (begin == best_begin and priority < best_priority)


@njit(cache=True)
def interleave(  # type: ignore[no-untyped-def]
    lane,
    is_backward,
    duration,
    priority,
    group,
    size,
    num_waits,
    user_offsets,
    user_actions,
    lane_set,
    room,
    num_groups,
):
    """Position of every action on its lane and its end.

    Args:
        lane: lane of each action ``[actions]``.
        is_backward: 0 or 1 ``[actions]``.
        duration: believed seconds ``[actions]``.
        priority: lower first ``[actions]``.
        group: group, numbered from 0 in each set of lanes ``[actions]``.
        size: bytes that a forward adds and its backward frees, integers ``[actions]``.
        num_waits: actions each action waits for ``[actions]``.
        user_offsets: rows of ``user_actions`` ``[actions + 1]``.
        user_actions: actions that wait for each action, CSR.
        lane_set: set of each lane ``[lanes]``; actions of different sets do not depend on each other.
        room: bytes for activations ``[lanes]``.
        num_groups: groups of a set at most.

    Returns:
        Slot ``[actions]``, end in seconds ``[actions]``, and the number of forwards that were let through although
        memory was full, because nothing else was left to run: none if every group fits by itself.
    """
    num_actions, num_lanes = len(lane), len(room)
    waits = num_waits.copy()
    ready_at = np.zeros(num_actions)
    end = np.zeros(num_actions)
    slot = np.zeros(num_actions, np.int64)
    free, held = np.zeros(num_lanes), np.zeros(num_lanes, np.int64)
    last_pass, next_slot = np.full(num_lanes, 1, np.int64), np.zeros(num_lanes, np.int64)
    group_held = np.zeros((num_lanes, num_groups), np.int64)
    group_due = np.zeros((num_lanes, num_groups), np.int64)  # bytes of forwards to come
    group_left = np.zeros((num_lanes, num_groups), np.int64)  # actions to come
    first_open = np.zeros(num_lanes, np.int64)
    # Ready actions of each lane, an unordered list in its part of one array.
    lane_start = np.zeros(num_lanes + 1, np.int64)
    for a in range(num_actions):
        lane_start[lane[a] + 1] += 1
        group_left[lane[a], group[a]] += 1
        if is_backward[a] == FORWARD:
            group_due[lane[a], group[a]] += size[a]
    lane_start = np.cumsum(lane_start)
    ready = np.zeros(num_actions, np.int64)
    num_ready = np.zeros(num_lanes, np.int64)
    for a in range(num_actions):
        if waits[a] == 0:
            ready[lane_start[lane[a]] + num_ready[lane[a]]] = a
            num_ready[lane[a]] += 1
    forced = 0
    best = np.empty(2, np.int64)  # of each pass: place in the ready list, start and priority
    best_begin, best_priority = np.empty(2), np.empty(2)
    choice = np.full(num_lanes, -1, np.int64)  # place in the ready list
    stale = np.ones(num_lanes, np.bool_)
    by_set = np.argsort(lane_set, kind="mergesort")
    lo = 0
    while lo < num_lanes:
        hi = lo
        left = 0
        while hi < num_lanes and lane_set[by_set[hi]] == lane_set[by_set[lo]]:
            left += lane_start[by_set[hi] + 1] - lane_start[by_set[hi]]
            hi += 1
        while left > 0:
            chosen_lane, chosen_begin = -1, np.inf
            for position in range(lo, hi):
                r = by_set[position]
                if stale[r]:
                    stale[r] = False
                    choice[r] = -1
                    last = _last_admitted(r, room, first_open, group_held, group_due)
                    best[:], best_begin[:], best_priority[:] = -1, np.inf, np.inf
                    for p in range(lane_start[r], lane_start[r] + num_ready[r]):
                        a = ready[p]
                        q = is_backward[a]
                        begin = max(free[r], ready_at[a])
                        if not _better(begin, priority[a], best_begin[q], best_priority[q]):
                            continue
                        if q == FORWARD and (group[a] > last or held[r] + size[a] > room[r]):
                            continue
                        best[q], best_begin[q], best_priority[q] = p, begin, priority[a]
                    if best[0] >= 0 and best[1] >= 0 and best_begin[0] <= free[r] and best_begin[1] <= free[r]:
                        choice[r] = best[1 - last_pass[r]]
                    elif best[1] >= 0 and best_begin[1] <= best_begin[0]:
                        choice[r] = best[1]
                    else:
                        choice[r] = best[0]
                if choice[r] >= 0:
                    begin = max(free[r], ready_at[ready[choice[r]]])
                    if begin < chosen_begin:
                        chosen_lane, chosen_begin = r, begin
            if chosen_lane < 0:
                # Full everywhere, and a group does not fit by itself: let its next forward through.
                best_group, least, place = num_groups, np.inf, -1
                for position in range(lo, hi):
                    r = by_set[position]
                    for p in range(lane_start[r], lane_start[r] + num_ready[r]):
                        a = ready[p]
                        if group[a] < best_group or (group[a] == best_group and priority[a] < least):
                            best_group, least, chosen_lane, place = group[a], priority[a], r, p
                choice[chosen_lane] = place
                forced += 1
            r = chosen_lane
            p = choice[r]
            a = ready[p]
            num_ready[r] -= 1
            ready[p] = ready[lane_start[r] + num_ready[r]]
            g = group[a]
            end[a] = max(free[r], ready_at[a]) + duration[a]
            free[r] = end[a]
            slot[a] = next_slot[r]
            next_slot[r] += 1
            last_pass[r] = is_backward[a]
            if is_backward[a] == FORWARD:
                held[r] += size[a]
                group_held[r, g] += size[a]
                group_due[r, g] -= size[a]
            else:
                held[r] -= size[a]
                group_held[r, g] -= size[a]
            group_left[r, g] -= 1
            while first_open[r] < num_groups and group_left[r, first_open[r]] == 0:
                first_open[r] += 1
            stale[r] = True
            left -= 1
            for edge in range(user_offsets[a], user_offsets[a + 1]):
                user = user_actions[edge]
                ready_at[user] = max(ready_at[user], end[a])
                waits[user] -= 1
                if waits[user] == 0:
                    u = lane[user]
                    ready[lane_start[u] + num_ready[u]] = user
                    num_ready[u] += 1
                    stale[u] = True
        lo = hi
    return slot, end, forced
