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

from typing import NamedTuple

import numpy as np
from numba import njit

from entrain_bench.arrays import BoolArray, FloatArray, IntArray, offsets_from_counts
from entrain_bench.compiled import inlined

FORWARD, BACKWARD = 0, 1
UNLIMITED = np.iinfo(np.int64).max


class Actions(NamedTuple):
    """What is put in order.

    Attributes:
        lane: lane of each action ``[actions]``.
        is_backward: 0 or 1 ``[actions]``.
        duration_s: believed seconds ``[actions]``.
        priority: lower first; it tells actions of a lane and pass apart that may be ready together ``[actions]``.
        group: group, numbered from 0 in each set of lanes ``[actions]``.
        size_bytes: what a forward adds and its backward frees, integers ``[actions]``.
        num_waits: actions each action waits for ``[actions]``.
        user_offsets, user_actions: actions that wait for each action, CSR.
    """

    lane: IntArray
    is_backward: IntArray
    duration_s: FloatArray
    priority: FloatArray
    group: IntArray
    size_bytes: IntArray
    num_waits: IntArray
    user_offsets: IntArray
    user_actions: IntArray


class Queues(NamedTuple):
    """What is ready: queue 2 l holds forwards of lane l, queue 2 l + 1 its backwards, each in no order.

    Attributes:
        first: place of the first action of each queue in ``ready`` ``[queues + 1]``.
        length: actions in each queue ``[queues]``.
        ready: room for the actions of one queue after another ``[actions]``.
        ready_s: when the last of the inputs that have ended did ``[actions]``.
        num_missing: inputs that have not ended ``[actions]``.
    """

    first: IntArray
    length: IntArray
    ready: IntArray
    ready_s: FloatArray
    num_missing: IntArray


class Lanes(NamedTuple):
    """Clock, memory and next action of each lane ``[lanes]``.

    Attributes:
        room_bytes, held_bytes: for activations, and what they take.
        free_s: end of its last action.
        last_pass: 0 or 1; a lane begins as if after a backward.
        num_run: actions it has run.
        is_stale: whether its choice has to be made anew, for something has changed.
        choice, begin_s: place of its next action in ``ready`` and when that can begin; -1 and infinite for none.
    """

    room_bytes: IntArray
    held_bytes: IntArray
    free_s: FloatArray
    last_pass: IntArray
    num_run: IntArray
    is_stale: BoolArray
    choice: IntArray
    begin_s: FloatArray


class Groups(NamedTuple):
    """What is left of each group on each lane.

    Attributes:
        need_bytes: what its forwards hold and will hold ``[lanes, groups]``.
        num_left: actions to come ``[lanes, groups]``.
        first_open: first group with actions to come ``[lanes]``.
    """

    need_bytes: IntArray
    num_left: IntArray
    first_open: IntArray


def interleave(actions: Actions, lane_set: IntArray, room_bytes: IntArray) -> tuple[IntArray, FloatArray, int]:
    """Position of every action on its lane and its end.

    Args:
        actions: what is put in order.
        lane_set: set of each lane, from 0 ``[lanes]``; actions of different sets do not depend on each other.
        room_bytes: for activations, integers ``[lanes]``.

    Returns:
        Slot ``[actions]``, end in seconds ``[actions]``, and the number of forwards that were let through although
        memory was full, because nothing else was left to run: none if every group fits by itself.
    """
    set_offsets, by_set = offsets_from_counts(np.bincount(lane_set)), np.argsort(lane_set, kind="stable")
    slot, end_s, forced = _interleave(set_offsets, by_set, actions, *_nothing_run(actions, room_bytes))
    return slot, end_s, forced


def _nothing_run(actions: Actions, room_bytes: IntArray) -> tuple[Queues, Lanes, Groups]:
    """The state before the first action, with empty queues."""
    num_actions, num_lanes, num_groups = len(actions.lane), len(room_bytes), int(actions.group.max()) + 1
    place, shape = actions.lane * num_groups + actions.group, (num_lanes, num_groups)
    num_left = np.bincount(place, minlength=num_lanes * num_groups).reshape(shape)
    held_bytes = np.where(actions.is_backward, 0, actions.size_bytes)
    # Sums of bytes are integers that floats hold.
    need_bytes = np.bincount(place, held_bytes, num_lanes * num_groups).astype(np.int64).reshape(shape)
    queues = Queues(
        first=offsets_from_counts(np.bincount(2 * actions.lane + actions.is_backward, minlength=2 * num_lanes)),
        length=np.zeros(2 * num_lanes, np.int64),
        ready=np.zeros(num_actions, np.int64),
        ready_s=np.zeros(num_actions),
        num_missing=actions.num_waits.copy(),
    )
    lanes = Lanes(
        room_bytes=room_bytes,
        held_bytes=np.zeros(num_lanes, np.int64),
        free_s=np.zeros(num_lanes),
        last_pass=np.full(num_lanes, BACKWARD),
        num_run=np.zeros(num_lanes, np.int64),
        is_stale=np.ones(num_lanes, np.bool_),
        choice=np.full(num_lanes, -1),
        begin_s=np.full(num_lanes, np.inf),
    )
    return queues, lanes, Groups(need_bytes, num_left, (num_left > 0).argmax(axis=1))


@njit(cache=True)
def _interleave(set_offsets, by_set, actions, queues, lanes, groups):  # type: ignore[no-untyped-def]
    """The loop: one set of lanes after the other, an action a turn."""
    slot, end_s = np.zeros(len(actions.lane), np.int64), np.zeros(len(actions.lane))
    forced = 0
    for action in range(len(actions.lane)):
        if actions.num_waits[action] == 0:
            _join(action, actions, queues, lanes)
    for one in range(len(set_offsets) - 1):
        members = by_set[set_offsets[one] : set_offsets[one + 1]]
        while True:
            lane = _soonest(members, actions, queues, lanes, groups)
            if lane < 0:
                lane = _let_through(members, actions, queues, lanes)
                if lane < 0:
                    break
                forced += 1
            action = _take(lane, actions, queues, lanes)
            slot[action] = lanes.num_run[lane]
            end_s[action] = max(lanes.free_s[lane], queues.ready_s[action]) + actions.duration_s[action]
            _run(action, end_s[action], actions, lanes, groups)
            _wake_users(action, end_s[action], actions, queues, lanes)
    return slot, end_s, forced


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
    free_s = lanes.free_s[lane]
    last_group = last_admitted(groups.need_bytes[lane], lanes.room_bytes[lane], groups.first_open[lane])
    spare_bytes = lanes.room_bytes[lane] - lanes.held_bytes[lane]
    forward, forward_s = _front(2 * lane, free_s, last_group, spare_bytes, actions, queues)
    # Backwards free memory: they are always admitted.
    backward, backward_s = _front(2 * lane + 1, free_s, UNLIMITED, UNLIMITED, actions, queues)
    if max(forward_s, backward_s) <= free_s:
        # No bubble to fill: in turn, as in 1F1B.
        backward_next = lanes.last_pass[lane] == FORWARD
    else:
        # Of two that begin together the backward, which frees memory.
        backward_next = backward_s <= forward_s
    lanes.choice[lane] = backward if backward_next else forward
    lanes.begin_s[lane] = backward_s if backward_next else forward_s
    lanes.is_stale[lane] = False


@inlined
def _front(queue, free_s, last_group, spare_bytes, actions, queues):  # type: ignore[no-untyped-def]
    """Place of the action of a queue that can begin first, then by priority, and when; -1 and infinite if none may."""
    front, front_s, front_priority = -1, np.inf, np.inf
    first = queues.first[queue]
    for place in range(first, first + queues.length[queue]):
        action = queues.ready[place]
        if actions.group[action] <= last_group and actions.size_bytes[action] <= spare_bytes:
            begin_s, priority = max(free_s, queues.ready_s[action]), actions.priority[action]
            if begin_s < front_s or (begin_s == front_s and priority < front_priority):
                front, front_s, front_priority = place, begin_s, priority
    return front, front_s


@inlined
def last_admitted(need_bytes, room_bytes, first_open):  # type: ignore[no-untyped-def]
    """The last group whose forwards may start: with all that open groups up to it still need, the lane is not full.

    Args:
        need_bytes: what each group holds and will hold on a lane ``[groups]``.
        room_bytes: the lane's.
        first_open: the first group with actions to come.
    """
    group, reserved_bytes = first_open, 0
    while group < len(need_bytes):
        reserved_bytes += need_bytes[group]
        if reserved_bytes > room_bytes:
            break
        group += 1
    # The earliest open group waits for its own backwards at most.
    return max(group - 1, first_open)


@njit(cache=True)
def _let_through(members, actions, queues, lanes):  # type: ignore[no-untyped-def]
    """All lanes are full, and a group does not fit by itself: the lane of its next forward; -1 if all is done."""
    through, through_place, earliest, least = -1, -1, UNLIMITED, np.inf
    for lane in members:
        first = queues.first[2 * lane]
        for place in range(first, first + queues.length[2 * lane]):
            action = queues.ready[place]
            group, priority = actions.group[action], actions.priority[action]
            if group < earliest or (group == earliest and priority < least):
                through, through_place, earliest, least = lane, place, group, priority
    if through >= 0:
        lanes.choice[through] = through_place
    return through


@inlined
def _take(lane, actions, queues, lanes):  # type: ignore[no-untyped-def]
    """The action that a lane has chosen, out of its queue; the queue's last one takes its place."""
    place = lanes.choice[lane]
    action = queues.ready[place]
    queue = 2 * lane + actions.is_backward[action]
    queues.length[queue] -= 1
    queues.ready[place] = queues.ready[queues.first[queue] + queues.length[queue]]
    return action


@inlined
def _run(action, end_s, actions, lanes, groups):  # type: ignore[no-untyped-def]
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
    groups.num_left[lane, group] -= 1
    groups.first_open[lane] = first_open(groups.num_left[lane], groups.first_open[lane])


@inlined
def first_open(num_left, group):  # type: ignore[no-untyped-def]
    """The first group with actions to come, from a group on; their number if there is none.

    Args:
        num_left: actions to come of each group ``[groups]``.
        group: where the search begins.
    """
    while group < len(num_left) and num_left[group] == 0:
        group += 1
    return group


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
    queues.ready[queues.first[queue] + queues.length[queue]] = action
    queues.length[queue] += 1
    lanes.is_stale[lane] = True
