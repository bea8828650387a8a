"""A list scheduler for actions that occupy one lane or several; compiled.

The action that can begin first is placed next. A lane chooses among those whose inputs are there, by priority, forwards
and backwards in turn. Chunks that depend on each other form a group; a forward is let in where all that the groups up
to its own hold and will hold fits together on each of its lanes. So no order can deadlock, and no lane exceeds its room
if every group fits alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from entrain_bench.base.arrays import FloatArray, IntArray, offsets_from_counts, rows_of, take_rows
from entrain_bench.base.compiled import inlined, njit
from entrain_bench.program import Program

FORWARD = 0
BACKWARD = 1


class ListedActions(NamedTuple):
    """Actions to order on the lanes of one replica."""

    lane_offsets: IntArray  # of the lanes of each action, CSR
    lanes: IntArray
    is_backward: IntArray  # 0 or 1 ``[actions]``
    duration_s: FloatArray  # estimated seconds ``[actions]``
    size_bytes: IntArray  # bytes that a forward adds and its backward frees, integers ``[actions]``
    num_waits: IntArray  # actions that it waits for ``[actions]``
    user_offsets: IntArray  # of actions that wait for it, CSR
    user_actions: IntArray
    station: IntArray  # lanes that some action occupies together have one number ``[lanes]``
    room_bytes: IntArray  # for activations, integers ``[lanes]``

    def of(self, chosen: IntArray, members: IntArray) -> ListedActions:
        """Return a renumbered part of the actions, with their lanes; no other action depends on it or runs there."""
        lane = np.zeros(len(self.room_bytes), np.int64)
        action = np.zeros(len(self.duration_s), np.int64)
        lane[members] = np.arange(len(members))
        action[chosen] = np.arange(len(chosen))
        lane_offsets, entries = take_rows(self.lane_offsets, chosen)
        user_offsets, users = take_rows(self.user_offsets, chosen)
        renumbered: dict[str, Any] = {
            "lane_offsets": lane_offsets,
            "lanes": lane[self.lanes[entries]],
            "user_offsets": user_offsets,
            "user_actions": action[self.user_actions[users]],
            "station": self.station[members],
            "room_bytes": self.room_bytes[members],
        }
        alike = {name: getattr(self, name)[chosen] for name in self._fields if name not in renumbered}
        return ListedActions(**renumbered, **alike)


def list_lanes(draft: Program) -> tuple[IntArray, IntArray]:
    """Return the lanes of every forward and backward, as CSR."""
    counts = []
    lanes = []
    for rows, blocks in zip(draft.chunks, draft.layout.blocks, strict=True):
        block = (rows.replica[:, None] * blocks.num_stages + np.arange(blocks.num_stages)).ravel()
        offsets, entries = take_rows(blocks.offsets, np.concatenate([block, block]))
        counts.append(np.diff(offsets))
        lanes.append(blocks.lanes[entries])
    return offsets_from_counts(np.concatenate(counts)), np.concatenate(lanes).astype(np.int64)


def draft_actions(
    draft: Program, duration_s: FloatArray, size_bytes: IntArray, room_bytes: IntArray, station: IntArray
) -> ListedActions:
    """The forwards and backwards of a program."""
    count = int(draft.first_action[-1])
    lane_offsets, lanes = list_lanes(draft)
    edge = np.argsort(draft.dep_actions, kind="stable")
    return ListedActions(
        lane_offsets=lane_offsets,
        lanes=lanes,
        is_backward=draft.kind[:count].astype(np.int64),
        duration_s=duration_s,
        size_bytes=size_bytes,
        num_waits=np.diff(draft.dep_offsets)[:count],
        user_offsets=offsets_from_counts(np.bincount(draft.dep_actions, minlength=count)),
        user_actions=rows_of(draft.dep_offsets)[edge],
        station=station,
        room_bytes=room_bytes,
    )


class Wish(NamedTuple):
    """Groups and priorities of a schedule."""

    group: IntArray  # place of the action's group in the order of groups ``[actions]``
    priority: FloatArray  # lower first ``[actions]``


class State(NamedTuple):
    """Progress of lanes, groups and actions."""

    queue: IntArray  # ready actions of each lane and pass, the first by priority last; queue 2 l + pass
    first: IntArray  # place of each in ``queue`` ``[queues + 1]``
    num_ready: IntArray  # ``[queues]``
    ready_s: FloatArray  # when the last of an action's inputs arrives ``[actions]``
    missing: IntArray  # inputs that are not placed yet ``[actions]``
    done_s: FloatArray  # end of a lane's last action ``[lanes]``
    last: IntArray  # that action, -1 for none ``[lanes]``
    held_bytes: IntArray  # by activations ``[lanes]``
    choice: IntArray  # next action of a lane, -1 for none ``[lanes]``
    begin_s: FloatArray  # its begin ``[lanes]``
    is_stale: IntArray  # whether these must be computed again ``[lanes]``
    need_bytes: IntArray  # memory that a group's forwards hold and will hold ``[lanes, groups]``
    left: IntArray  # actions of it to come ``[lanes, groups]``
    first_open: IntArray  # first group of a lane with actions to come ``[lanes]``
    first_refused: IntArray  # first group from there on that does not fit with those before it ``[lanes]``
    admitted_bytes: IntArray  # memory that the groups between these two need ``[lanes]``


@njit(nogil=True)
def list_schedule(actions, wish, place):  # type: ignore[no-untyped-def]
    """Give actions their ``place`` ``[actions]``; return when the last ends, and forced forwards."""
    state = _begin(actions, wish)
    forced = 0
    end_s = 0.0
    for turn in range(len(actions.duration_s)):
        lane = _soonest(actions, wish, state)
        if lane < 0:
            action = _let_in(actions, wish, state)
            forced += 1
        else:
            action = state.choice[lane]
        place[action] = turn
        end_s = max(end_s, _run(action, _begin_s(action, actions, state), actions, wish, state))
    return end_s, forced


@njit(nogil=True)
def _begin(actions, wish):  # type: ignore[no-untyped-def]
    """The state before the first action."""
    num_actions = len(actions.duration_s)
    num_lanes = len(actions.room_bytes)
    num_groups = 0
    first = np.zeros(2 * num_lanes + 1, np.int64)
    for action in range(num_actions):
        num_groups = max(num_groups, wish.group[action] + 1)
        for row in range(actions.lane_offsets[action], actions.lane_offsets[action + 1]):
            first[2 * actions.lanes[row] + actions.is_backward[action] + 1] += 1
    first = first.cumsum()
    state = State(
        queue=np.zeros(first[-1], np.int64),
        first=first,
        num_ready=np.zeros(2 * num_lanes, np.int64),
        ready_s=np.zeros(num_actions),
        missing=actions.num_waits.copy(),
        done_s=np.zeros(num_lanes),
        last=np.full(num_lanes, -1),
        held_bytes=np.zeros(num_lanes, np.int64),
        choice=np.zeros(num_lanes, np.int64),
        begin_s=np.zeros(num_lanes),
        is_stale=np.ones(num_lanes, np.int64),
        need_bytes=np.zeros((num_lanes, num_groups), np.int64),
        left=np.zeros((num_lanes, num_groups), np.int64),
        first_open=np.zeros(num_lanes, np.int64),
        first_refused=np.zeros(num_lanes, np.int64),
        admitted_bytes=np.zeros(num_lanes, np.int64),
    )
    for action in range(num_actions):
        for row in range(actions.lane_offsets[action], actions.lane_offsets[action + 1]):
            lane = actions.lanes[row]
            state.left[lane, wish.group[action]] += 1
            if actions.is_backward[action] == FORWARD:
                state.need_bytes[lane, wish.group[action]] += actions.size_bytes[action]
        if state.missing[action] == 0:
            _join(action, actions, wish, state)
    for lane in range(num_lanes):
        _close_groups(lane, state)
        _admit_groups(lane, actions, state)
    return state


@inlined
def _join(action, actions, wish, state):  # type: ignore[no-untyped-def]
    """Put a ready action into the queues of its lanes, by falling number: the first by priority is last."""
    for row in range(actions.lane_offsets[action], actions.lane_offsets[action + 1]):
        lane = actions.lanes[row]
        queue = 2 * lane + actions.is_backward[action]
        spot = state.first[queue] + state.num_ready[queue]
        while spot > state.first[queue] and wish.priority[state.queue[spot - 1]] < wish.priority[action]:
            state.queue[spot] = state.queue[spot - 1]
            spot -= 1
        state.queue[spot] = action
        state.num_ready[queue] += 1
        state.is_stale[lane] = 1


@inlined
def _leave(action, lane, actions, state):  # type: ignore[no-untyped-def]
    """Take an action out of a lane's queue."""
    queue = 2 * lane + actions.is_backward[action]
    spot = state.first[queue] + state.num_ready[queue] - 1
    while state.queue[spot] != action:
        spot -= 1
    state.num_ready[queue] -= 1
    while spot < state.first[queue] + state.num_ready[queue]:
        state.queue[spot] = state.queue[spot + 1]
        spot += 1


@inlined
def _begin_s(action, actions, state):  # type: ignore[no-untyped-def]
    """When all lanes of a ready action may begin it."""
    begin_s = state.ready_s[action]
    for row in range(actions.lane_offsets[action], actions.lane_offsets[action + 1]):
        begin_s = max(begin_s, state.done_s[actions.lanes[row]])
    return begin_s


@inlined
def _may_run(action, actions, wish, state):  # type: ignore[no-untyped-def]
    """Whether memory lets an action in on all of its lanes; backwards free some."""
    if actions.is_backward[action] == BACKWARD:
        return True
    for row in range(actions.lane_offsets[action], actions.lane_offsets[action + 1]):
        lane = actions.lanes[row]
        if wish.group[action] > max(state.first_refused[lane] - 1, state.first_open[lane]):
            return False
        if state.held_bytes[lane] + actions.size_bytes[action] > actions.room_bytes[lane]:
            return False
    return True


@inlined
def _soonest(actions, wish, state):  # type: ignore[no-untyped-def]
    """Return the lane whose choice can begin first; -1 if no lane may run an action."""
    soonest = -1
    soonest_s = np.inf
    for lane in range(len(actions.room_bytes)):
        if state.is_stale[lane]:
            _choose(lane, actions, wish, state)
            state.is_stale[lane] = 0
        if state.begin_s[lane] < soonest_s:
            soonest = lane
            soonest_s = state.begin_s[lane]
    return soonest


@inlined
def _choose(lane, actions, wish, state):  # type: ignore[no-untyped-def]
    """Choose a lane's next action; another action that arrives before its start may replace it."""
    forward = -1
    backward = -1
    coming = -1
    coming_s = np.inf
    for kind in range(2):
        queue = 2 * lane + kind
        spot = state.first[queue] + state.num_ready[queue] - 1
        while spot >= state.first[queue]:
            action = state.queue[spot]
            if _may_run(action, actions, wish, state):
                if state.ready_s[action] <= state.done_s[lane]:
                    if kind == FORWARD:
                        forward = action
                    else:
                        backward = action
                    break
                # A backward, which frees memory, goes before others that come together with it.
                first = coming < 0 or actions.is_backward[coming] == FORWARD
                equal = kind == BACKWARD and state.ready_s[action] == coming_s and first
                if state.ready_s[action] < coming_s or equal:
                    coming = action
                    coming_s = state.ready_s[action]
            spot -= 1
    chosen = max(forward, backward)
    if forward >= 0 and backward >= 0:
        last = state.last[lane]
        chosen = backward if last >= 0 and actions.is_backward[last] == FORWARD else forward
    elif chosen < 0:
        chosen = coming
    state.choice[lane] = chosen
    state.begin_s[lane] = _begin_s(chosen, actions, state) if chosen >= 0 else np.inf


@njit(nogil=True)
def _let_in(actions, wish, state):  # type: ignore[no-untyped-def]
    """Return the first ready forward of a group that exceeds memory even alone, when all lanes are full."""
    chosen = -1
    first = (0, 0.0)
    for lane in range(len(actions.room_bytes)):
        queue = 2 * lane
        for spot in range(state.first[queue], state.first[queue] + state.num_ready[queue]):
            action = state.queue[spot]
            rank = (wish.group[action], wish.priority[action])
            if chosen < 0 or rank < first:
                chosen = action
                first = rank
    return chosen


@inlined
def _run(action, begin_s, actions, wish, state):  # type: ignore[no-untyped-def]
    """Update clock and memory of an action's lanes, and its ready users; return its end in seconds."""
    group = wish.group[action]
    size_bytes = actions.size_bytes[action]
    end_s = begin_s + actions.duration_s[action]
    for row in range(actions.lane_offsets[action], actions.lane_offsets[action + 1]):
        lane = actions.lanes[row]
        _leave(action, lane, actions, state)
        state.done_s[lane] = end_s
        state.last[lane] = action
        state.left[lane, group] -= 1
        state.held_bytes[lane] += (1 - 2 * actions.is_backward[action]) * size_bytes
        if actions.is_backward[action] == BACKWARD:
            state.need_bytes[lane, group] -= size_bytes
            if group < state.first_refused[lane]:
                state.admitted_bytes[lane] -= size_bytes
        _close_groups(lane, state)
        _admit_groups(lane, actions, state)
        for other in range(len(actions.room_bytes)):
            if actions.station[other] == actions.station[lane]:
                state.is_stale[other] = 1
    for row in range(actions.user_offsets[action], actions.user_offsets[action + 1]):
        user = actions.user_actions[row]
        state.ready_s[user] = max(state.ready_s[user], end_s)
        state.missing[user] -= 1
        if state.missing[user] == 0:
            _join(user, actions, wish, state)
    return end_s


@inlined
def _close_groups(lane, state):  # type: ignore[no-untyped-def]
    """Advance each lane's first group with remaining actions; finished groups hold no memory."""
    group = state.first_open[lane]
    while group < state.left.shape[1] and state.left[lane, group] == 0:
        group += 1
    state.first_open[lane] = group
    state.first_refused[lane] = max(state.first_refused[lane], group)


@inlined
def _admit_groups(lane, actions, state):  # type: ignore[no-untyped-def]
    """Advance the first refused group. Needs only fall, so it never moves back."""
    group = state.first_refused[lane]
    ahead = state.admitted_bytes[lane]
    while group < state.need_bytes.shape[1] and ahead + state.need_bytes[lane, group] <= actions.room_bytes[lane]:
        ahead += state.need_bytes[lane, group]
        group += 1
    state.first_refused[lane] = group
    state.admitted_bytes[lane] = ahead
