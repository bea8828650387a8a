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

from entrain_bench.base.compiled import inlined

from .state import BACKWARD, FORWARD

UNLIMITED = np.iinfo(np.int64).max


@njit(cache=True, nogil=True)
def interleave(members, own, actions, state, schedule):  # type: ignore[no-untyped-def]
    """Put the actions of one set of lanes in order, an action a turn.

    Args:
        members: lanes of the set; they do not depend on others ``[members]``.
        own: their actions, rising ``[own]``.
        actions: ``Actions`` of all sets.
        state: what ``room_for`` made for them.
        schedule: ``Schedule`` to write into.

    Returns:
        The number of forwards that were let through although memory was full, because nothing else was left to run:
        none if every group fits by itself.
    """
    queues, lanes, groups = state
    _begin(members, own, actions, queues, lanes, groups)
    forced = 0
    while True:
        lane = _soonest(members, actions, queues, lanes, groups)
        if lane < 0:
            lane = _let_through(members, actions, queues, lanes)
            if lane < 0:
                return forced
            forced += 1
        action = lanes.choice[lane]
        end_s = max(lanes.free_s[lane], queues.ready_s[action]) + actions.duration_s[action]
        schedule.slot[action], schedule.end_s[action] = lanes.num_run[lane], end_s
        _take(action, actions, queues, lanes)
        _run(action, end_s, actions, queues, lanes, groups)
        _wake_users(action, end_s, actions, queues, lanes)


@inlined
def _begin(members, own, actions, queues, lanes, groups):  # type: ignore[no-untyped-def]
    """The state before the first action."""
    for lane in members:
        for queue in range(2 * lane, 2 * lane + 2):
            queues.due_begin[queue] = queues.due_end[queue] = queues.num_coming[queue] = 0
        lanes.held_bytes[lane] = lanes.num_run[lane] = 0
        lanes.free_s[lane], lanes.last_pass[lane], lanes.is_stale[lane] = 0.0, BACKWARD, True
        groups.first_open[lane] = groups.first_refused[lane] = groups.admitted_bytes[lane] = 0
        for group in range(groups.num_left.shape[1]):
            groups.num_left[lane, group] = groups.need_bytes[lane, group] = 0
    for action in own:
        lane, group = actions.lane[action], actions.group[action]
        groups.num_left[lane, group] += 1
        if actions.is_backward[action] == FORWARD:
            groups.need_bytes[lane, group] += actions.size_bytes[action]
        queues.ready_s[action], queues.num_missing[action] = 0.0, actions.num_waits[action]
        if actions.num_waits[action] == 0:
            _join(action, actions, queues, lanes)
    for lane in members:
        close_groups(lane, groups)


@inlined
def _soonest(members, actions, queues, lanes, groups):  # type: ignore[no-untyped-def]
    """The lane that can begin its next action first; -1 if no lane may run anything."""
    soonest, soonest_s = -1, np.inf
    for lane in members:
        if lanes.is_stale[lane]:
            _choose(lane, actions, queues, lanes, groups)
        if lanes.begin_s[lane] < soonest_s:
            soonest, soonest_s = lane, lanes.begin_s[lane]
    return soonest


@inlined
def _choose(lane, actions, queues, lanes, groups):  # type: ignore[no-untyped-def]
    """Choose what a lane runs next, unless something comes in before that begins."""
    admit_groups(lane, lanes, groups)
    # The earliest open group waits for its own backwards at most.
    last_group = max(groups.first_refused[lane] - 1, groups.first_open[lane])
    spare_bytes = lanes.room_bytes[lane] - lanes.held_bytes[lane]
    forward = _first_due(2 * lane, last_group, spare_bytes, actions, queues)
    # Backwards free memory: they are always admitted.
    backward = _first_due(2 * lane + 1, UNLIMITED, UNLIMITED, actions, queues)
    forward_s = backward_s = lanes.free_s[lane]
    if forward >= 0 and backward >= 0:
        # No bubble to fill: in turn, as in 1F1B.
        backward_next = lanes.last_pass[lane] == FORWARD
    elif forward >= 0 or backward >= 0:
        backward_next = backward >= 0
    else:
        forward, forward_s = _first_coming(2 * lane, last_group, spare_bytes, actions, queues)
        backward, backward_s = _first_coming(2 * lane + 1, UNLIMITED, UNLIMITED, actions, queues)
        # Of two that begin together the backward, which frees memory.
        backward_next = backward_s <= forward_s
    lanes.choice[lane] = backward if backward_next else forward
    lanes.begin_s[lane] = backward_s if backward_next else forward_s
    lanes.is_stale[lane] = False


@inlined
def _first_due(queue, last_group, spare_bytes, actions, queues):  # type: ignore[no-untyped-def]
    """The due action of a queue that comes first by priority, of those that may run; -1 if there is none."""
    first = queues.first[queue]
    for place in range(first + queues.due_begin[queue], first + queues.due_end[queue]):
        action = queues.due[place]
        if actions.group[action] <= last_group and actions.size_bytes[action] <= spare_bytes:
            return action
    return -1


@inlined
def _first_coming(queue, last_group, spare_bytes, actions, queues):  # type: ignore[no-untyped-def]
    """The action of a queue that comes first, then by priority, of those that may run, and when; -1 and infinite."""
    front, front_s, front_priority = -1, np.inf, np.inf
    first = queues.first[queue]
    for place in range(first, first + queues.num_coming[queue]):
        action = queues.coming[place]
        if actions.group[action] <= last_group and actions.size_bytes[action] <= spare_bytes:
            ready_s, priority = queues.ready_s[action], actions.priority[action]
            if ready_s < front_s or (ready_s == front_s and priority < front_priority):
                front, front_s, front_priority = action, ready_s, priority
    return front, front_s


@inlined
def admit_groups(lane, lanes, groups):  # type: ignore[no-untyped-def]
    """Move on the first group that is refused: with all that those before it still need, the lane is not full.

    Needs only fall, so that it never moves back.
    """
    group, bytes_ahead = groups.first_refused[lane], groups.admitted_bytes[lane]
    while group < groups.need_bytes.shape[1]:
        if bytes_ahead + groups.need_bytes[lane, group] > lanes.room_bytes[lane]:
            break
        bytes_ahead += groups.need_bytes[lane, group]
        group += 1
    groups.first_refused[lane], groups.admitted_bytes[lane] = group, bytes_ahead


@inlined
def close_groups(lane, groups):  # type: ignore[no-untyped-def]
    """Move on the first group with actions to come; what has closed holds nothing any more."""
    group = groups.first_open[lane]
    while group < groups.num_left.shape[1] and groups.num_left[lane, group] == 0:
        group += 1
    groups.first_open[lane] = group
    groups.first_refused[lane] = max(groups.first_refused[lane], group)


@njit(cache=True)
def _let_through(members, actions, queues, lanes):  # type: ignore[no-untyped-def]
    """All lanes are full, and a group does not fit by itself: the lane of its next forward; -1 if all is done."""
    through, chosen, earliest, least = -1, -1, UNLIMITED, np.inf
    for lane in members:
        queue = 2 * lane
        first, num_due = queues.first[queue], queues.due_end[queue] - queues.due_begin[queue]
        for index in range(num_due + queues.num_coming[queue]):
            if index < num_due:
                action = queues.due[first + queues.due_begin[queue] + index]
            else:
                action = queues.coming[first + index - num_due]
            group, priority = actions.group[action], actions.priority[action]
            if group < earliest or (group == earliest and priority < least):
                through, chosen, earliest, least = lane, action, group, priority
    if through >= 0:
        lanes.choice[through] = chosen
    return through


@inlined
def _take(action, actions, queues, lanes):  # type: ignore[no-untyped-def]
    """Take an action out of its queue."""
    lane = actions.lane[action]
    queue = 2 * lane + actions.is_backward[action]
    first = queues.first[queue]
    if queues.ready_s[action] <= lanes.free_s[lane]:
        place = first + queues.due_begin[queue]
        # Those before it move up.
        before = queues.due[place]
        while before != action:
            place += 1
            before, queues.due[place] = queues.due[place], before
        queues.due_begin[queue] += 1
    else:
        place = first
        while queues.coming[place] != action:
            place += 1
        queues.num_coming[queue] -= 1
        queues.coming[place] = queues.coming[first + queues.num_coming[queue]]


@inlined
def _run(action, end_s, actions, queues, lanes, groups):  # type: ignore[no-untyped-def]
    """Clock and memory of the lane after an action."""
    lane, group, size_bytes = actions.lane[action], actions.group[action], actions.size_bytes[action]
    lanes.free_s[lane] = end_s
    lanes.last_pass[lane] = actions.is_backward[action]
    lanes.num_run[lane] += 1
    lanes.is_stale[lane] = True
    if actions.is_backward[action] == FORWARD:
        lanes.held_bytes[lane] += size_bytes
    else:
        lanes.held_bytes[lane] -= size_bytes
        groups.need_bytes[lane, group] -= size_bytes
        if group < groups.first_refused[lane]:
            groups.admitted_bytes[lane] -= size_bytes
    groups.num_left[lane, group] -= 1
    close_groups(lane, groups)
    for queue in range(2 * lane, 2 * lane + 2):
        _fall_due(queue, end_s, actions, queues)


@inlined
def _fall_due(queue, free_s, actions, queues):  # type: ignore[no-untyped-def]
    """Move what has come by a time to what is due."""
    first = queues.first[queue]
    place = first
    while place < first + queues.num_coming[queue]:
        action = queues.coming[place]
        if queues.ready_s[action] <= free_s:
            queues.num_coming[queue] -= 1
            queues.coming[place] = queues.coming[first + queues.num_coming[queue]]
            _insert_due(queue, action, actions, queues)
        else:
            place += 1


@inlined
def _wake_users(action, end_s, actions, queues, lanes):  # type: ignore[no-untyped-def]
    """Hand an action's result on; who has waited for nothing else is ready."""
    for row in range(actions.user_offsets[action], actions.user_offsets[action + 1]):
        user = actions.user_actions[row]
        queues.ready_s[user] = max(queues.ready_s[user], end_s)
        queues.num_missing[user] -= 1
        if queues.num_missing[user] == 0:
            _join(user, actions, queues, lanes)


@inlined
def _join(action, actions, queues, lanes):  # type: ignore[no-untyped-def]
    """Put a ready action into its queue."""
    lane = actions.lane[action]
    queue = 2 * lane + actions.is_backward[action]
    if queues.ready_s[action] <= lanes.free_s[lane]:
        _insert_due(queue, action, actions, queues)
    else:
        queues.coming[queues.first[queue] + queues.num_coming[queue]] = action
        queues.num_coming[queue] += 1
    lanes.is_stale[lane] = True


@inlined
def _insert_due(queue, action, actions, queues):  # type: ignore[no-untyped-def]
    """Put an action among those that are due, by rising priority."""
    first = queues.first[queue]
    place = first + queues.due_end[queue]
    while (
        place > first + queues.due_begin[queue] and actions.priority[queues.due[place - 1]] > actions.priority[action]
    ):
        queues.due[place] = queues.due[place - 1]
        place -= 1
    queues.due[place] = action
    queues.due_end[queue] += 1
