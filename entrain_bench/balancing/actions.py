"""Actions that the list scheduler (``listing``) orders, and its state."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from entrain_bench.base.arrays import FloatArray, IntArray, offsets_from_counts, take_rows

FORWARD = 0
BACKWARD = 1
# Where the state says whether anything is held.
HOLDS = -1


class ListedActions(NamedTuple):
    """Actions to order on the lanes of one replica.

    Attributes:
        lane_offsets, lanes: lanes of each action, CSR.
        is_backward: 0 or 1 ``[actions]``.
        of_llm: 1 for the LLM's, and for generators', which its backwards wait for; 0 for encoders' ``[actions]``.
        duration_s: believed seconds ``[actions]``.
        send_s: for which its lanes are held after it ``[actions]``.
        receive_s: for which they are held before it, at the same time as by what was sent last ``[actions]``.
        size_bytes: what a forward adds and its backward frees, integers ``[actions]``.
        num_waits: actions that it waits for ``[actions]``.
        user_offsets, user_actions: actions that wait for it, CSR.
        user_delay_s: from its end until they have its results ``[users]``.
        station: lanes that some action occupies together have one number ``[lanes]``.
        room_bytes: for activations, integers ``[lanes]``.
        tail_s: believed seconds from an action's end until its stage's gradients are synchronised ``[actions]``.
        backward: of each forward, any action of a backward ``[actions]``.
        kept_bytes: what a pair takes besides if its activations are kept instead of recomputed, integers ``[actions]``.
        kept_s: what its backward is shorter by then ``[actions]``.
    """

    lane_offsets: IntArray
    lanes: IntArray
    is_backward: IntArray
    of_llm: IntArray
    duration_s: FloatArray
    send_s: FloatArray
    receive_s: FloatArray
    size_bytes: IntArray
    num_waits: IntArray
    user_offsets: IntArray
    user_actions: IntArray
    user_delay_s: FloatArray
    station: IntArray
    room_bytes: IntArray
    tail_s: FloatArray
    backward: IntArray
    kept_bytes: IntArray
    kept_s: FloatArray

    def of(self, chosen: IntArray, members: IntArray) -> ListedActions:
        """Some of them alone, renumbered with their lanes, on which nothing else runs and waits for nothing else."""
        lane = np.zeros(len(self.room_bytes), np.int64)
        action = np.zeros(len(self.duration_s), np.int64)
        lane[members] = np.arange(len(members))
        action[chosen] = np.arange(len(chosen))
        (lane_offsets, entries), (user_offsets, users) = (
            take_rows(offsets, chosen) for offsets in (self.lane_offsets, self.user_offsets)
        )
        return ListedActions(
            **{name: getattr(self, name)[chosen] for name in PER_ACTION},
            lane_offsets=lane_offsets,
            lanes=lane[self.lanes[entries]],
            user_offsets=user_offsets,
            user_actions=action[self.user_actions[users]],
            user_delay_s=self.user_delay_s[users],
            station=self.station[members],
            room_bytes=self.room_bytes[members],
            backward=action[self.backward[chosen]],
        )


# Attributes that say the same of an action whatever others are numbered.
PER_ACTION = (
    *("is_backward", "of_llm", "duration_s", "send_s", "receive_s", "size_bytes", "num_waits", "tail_s"),
    *("kept_bytes", "kept_s"),
)


def single_lane_actions(
    lane: IntArray,
    is_backward: IntArray,
    duration_s: FloatArray,
    size_bytes: IntArray,
    num_waits: IntArray,
    user_offsets: IntArray,
    user_actions: IntArray,
    room_bytes: IntArray,
) -> ListedActions:
    """Actions of one lane each, whose results are there at once; See ``ListedActions``."""
    none = np.zeros(len(lane), np.int64)
    at_once = np.zeros(len(lane))
    return ListedActions(
        lane_offsets=np.arange(len(lane) + 1),
        lanes=lane,
        is_backward=is_backward,
        of_llm=none,
        duration_s=duration_s,
        send_s=at_once,
        receive_s=at_once,
        size_bytes=size_bytes,
        num_waits=num_waits,
        user_offsets=user_offsets,
        user_actions=user_actions,
        user_delay_s=np.zeros(len(user_actions)),
        station=np.arange(len(room_bytes)),
        room_bytes=room_bytes,
        tail_s=at_once,
        backward=none,
        kept_bytes=none,
        kept_s=at_once,
    )


class Wish(NamedTuple):
    """Priorities and limits of a schedule.

    Attributes:
        group: place of the action's group in the order of groups ``[actions]``.
        priority: lower first ``[actions]``.
        is_held: 1 for backwards that wait until their lanes have done all of the LLM ``[actions]``.
        alternate: whether a lane takes forwards and backwards in turn; otherwise backwards first.
        last_of_equals: whether a lane that waits for several backwards of one time takes the last by priority; or else
            the first.
    """

    group: IntArray
    priority: FloatArray
    is_held: IntArray
    alternate: bool
    last_of_equals: bool = False


class State(NamedTuple):
    """Progress of lanes, groups and actions.

    Attributes:
        queue: ready actions of each lane and pass, the first by priority last; queue 2 l + pass is at ``first`` of it.
        first, num_ready: of each queue ``[queues + 1]``, ``[queues]``.
        ready_s: when the last of an action's inputs arrives ``[actions]``.
        missing: inputs that are not placed yet ``[actions]``.
        done_s, last: end of a lane's last action, and that action, -1 for none ``[lanes]``.
        held_bytes: by activations ``[lanes]``.
        is_kept: whether an action's activations are kept ``[actions]``.
        extra_bytes: what is held because activations are kept ``[lanes]``.
        choice, begin_s: next action of a lane, -1 for none, and its begin ``[lanes]``.
        is_stale: whether these have to be found anew ``[lanes]``.
        need_bytes: what a group's forwards hold and will hold ``[lanes, groups]``.
        left: actions of it to come ``[lanes, groups]``.
        llm_left: actions of the LLM to come ``[lanes]``; at the end whether anything is held, 0 or 1 ``[lanes + 1]``.
        first_open: first group of a lane with actions to come ``[lanes]``.
        first_refused: first group from there on that does not fit with those before it ``[lanes]``.
        admitted_bytes: what the groups between these two need ``[lanes]``.
        rest_s: how long actions to come occupy a lane at least ``[lanes]``.
        tail_s: least of the actions' ``tail_s`` on a lane ``[lanes]``.
    """

    queue: IntArray
    first: IntArray
    num_ready: IntArray
    ready_s: FloatArray
    missing: IntArray
    done_s: FloatArray
    last: IntArray
    held_bytes: IntArray
    is_kept: IntArray
    extra_bytes: IntArray
    choice: IntArray
    begin_s: FloatArray
    is_stale: IntArray
    need_bytes: IntArray
    left: IntArray
    llm_left: IntArray
    first_open: IntArray
    first_refused: IntArray
    admitted_bytes: IntArray
    rest_s: FloatArray
    tail_s: FloatArray


def room_for(actions: ListedActions, num_groups: int) -> State:
    """Room for the state of schedules of some actions."""
    num_actions = len(actions.duration_s)
    num_lanes = len(actions.room_bytes)
    queue_of = 2 * actions.lanes + np.repeat(actions.is_backward, np.diff(actions.lane_offsets))
    first = offsets_from_counts(np.bincount(queue_of, minlength=2 * num_lanes))

    def whole(*shape: int) -> IntArray:
        return np.zeros(shape, np.int64)

    return State(
        queue=whole(first[-1]),
        first=first,
        num_ready=whole(2 * num_lanes),
        ready_s=np.zeros(num_actions),
        missing=whole(num_actions),
        done_s=np.zeros(num_lanes),
        last=whole(num_lanes),
        held_bytes=whole(num_lanes),
        is_kept=whole(num_actions),
        extra_bytes=whole(num_lanes),
        choice=whole(num_lanes),
        begin_s=np.zeros(num_lanes),
        is_stale=whole(num_lanes),
        need_bytes=whole(num_lanes, num_groups),
        left=whole(num_lanes, num_groups),
        llm_left=whole(num_lanes + 1),
        first_open=whole(num_lanes),
        first_refused=whole(num_lanes),
        admitted_bytes=whole(num_lanes),
        rest_s=np.zeros(num_lanes),
        tail_s=np.zeros(num_lanes),
    )
