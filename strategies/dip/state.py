"""What DIP's interleaver works on: actions, and all that changes while it puts them in order."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from entrain_bench.base.arrays import BoolArray, FloatArray, IntArray, offsets_from_counts

FORWARD, BACKWARD = 0, 1


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
    """What is ready: queue 2 l holds forwards of lane l, queue 2 l + 1 its backwards.

    Actions whose inputs had ended when the lane's last action did are *due*; others *come* later.

    Attributes:
        first: place of the first action of each queue in ``due`` and in ``coming`` ``[queues + 1]``.
        due_begin, due_end: places of the due actions of each queue, counted from its first ``[queues]``.
        num_coming: actions of each queue that come later ``[queues]``.
        due: room for the due actions of one queue after another, by rising priority ``[actions]``.
        coming: room for the others, likewise, in no order ``[actions]``.
        ready_s: when the last of the inputs that have ended did ``[actions]``.
        num_missing: inputs that have not ended ``[actions]``.
    """

    first: IntArray
    due_begin: IntArray
    due_end: IntArray
    num_coming: IntArray
    due: IntArray
    coming: IntArray
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
        choice, begin_s: its next action and when that can begin; -1 and infinite for none.
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
        first_refused: first group from there on that does not fit with those before it ``[lanes]``.
        admitted_bytes: what the groups in between need ``[lanes]``.
    """

    need_bytes: IntArray
    num_left: IntArray
    first_open: IntArray
    first_refused: IntArray
    admitted_bytes: IntArray


class State(NamedTuple):
    """Everything that changes while actions are put in order."""

    queues: Queues
    lanes: Lanes
    groups: Groups


class Schedule(NamedTuple):
    """Position of every action on its lane, and its end in seconds ``[actions]``."""

    slot: IntArray
    end_s: FloatArray


def empty_schedule(num_actions: int) -> Schedule:
    """Room for a schedule."""
    return Schedule(np.zeros(num_actions, np.int64), np.zeros(num_actions))


def room_for(lane: IntArray, is_backward: IntArray, room_bytes: IntArray, num_groups: int) -> State:
    """Room for the state; ``interleave`` begins by setting it for its set of lanes.

    Args:
        lane: lane of each action ``[actions]``.
        is_backward: 0 or 1 ``[actions]``.
        room_bytes: for activations, integers ``[lanes]``.
        num_groups: groups of a set, at most.
    """
    num_actions, num_lanes = len(lane), len(room_bytes)
    queues = Queues(
        first=offsets_from_counts(np.bincount(2 * lane + is_backward, minlength=2 * num_lanes)),
        due_begin=np.zeros(2 * num_lanes, np.int64),
        due_end=np.zeros(2 * num_lanes, np.int64),
        num_coming=np.zeros(2 * num_lanes, np.int64),
        due=np.zeros(num_actions, np.int64),
        coming=np.zeros(num_actions, np.int64),
        ready_s=np.zeros(num_actions),
        num_missing=np.zeros(num_actions, np.int64),
    )
    lanes = Lanes(
        room_bytes=room_bytes,
        held_bytes=np.zeros(num_lanes, np.int64),
        free_s=np.zeros(num_lanes),
        last_pass=np.zeros(num_lanes, np.int64),
        num_run=np.zeros(num_lanes, np.int64),
        is_stale=np.zeros(num_lanes, np.bool_),
        choice=np.zeros(num_lanes, np.int64),
        begin_s=np.zeros(num_lanes),
    )
    by_group = (np.zeros((num_lanes, num_groups), np.int64) for _ in range(2))
    by_lane = (np.zeros(num_lanes, np.int64) for _ in range(3))
    return State(queues, lanes, Groups(*by_group, *by_lane))
