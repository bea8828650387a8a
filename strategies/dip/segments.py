"""What DIP's search orders: the segments of a program, and the schedule that an order of microbatches leads to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entrain_bench.balancing.groups import chunk_groups, components, users_of
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arrays import FloatArray, IntArray, rows_of
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment

from .belief import believed_durations, lanes_of_actions


@dataclass(frozen=True, slots=True)
class Segments:
    """The actions of a program, what they wait for, and the groups that the search puts in order.

    A *segment* is a forward or backward of a chunk through one stage on each rank (arXiv:2504.14145). Chunks that
    depend on each other are a *group*: a microbatch with the sub-microbatches of its encoders and generators. Lanes
    whose actions depend on each other are a *set*: a replica.

    Attributes:
        lane, is_backward, duration_s, size_bytes: of every action ``[actions]``.
        num_waits: actions that each action waits for ``[actions]``.
        user_offsets, user_actions: actions that wait for each action, CSR.
        lane_set: set of each lane ``[lanes]``.
        room_bytes: room for activations ``[lanes]``.
        group: group of each action, counted in its set by arrival ``[actions]``.
        element: what the search orders as one, counted likewise: the group, or the group's part of one module, of which
            ``per_group`` follow each other ``[actions]``.
        rank: place of each action's chunk in its group, of its pass ``[actions]``: forwards go by the first LLM
            microbatch they serve, then along the chain, backwards by the last, then against the chain.
        num_groups: groups of each set ``[sets]``.
    """

    lane: IntArray
    is_backward: IntArray
    duration_s: FloatArray
    size_bytes: IntArray
    num_waits: IntArray
    user_offsets: IntArray
    user_actions: IntArray
    lane_set: IntArray
    room_bytes: IntArray
    group: IntArray
    element: IntArray
    rank: IntArray
    num_groups: IntArray
    per_group: int


def segments_of(draft: Program, assignment: Assignment, profile: Profile, by_module: bool = False) -> Segments:
    """The segments of a program, whatever its own order.

    Args:
        draft: the program.
        assignment: what it was made of.
        profile: for memory and believed durations.
        by_module: whether the modules of a group are elements of their own.
    """
    memory = profile.memory
    count = int(draft.first_action[-1])
    lane = lanes_of_actions(draft)
    change, working = (values[:count] for values in memory.action_bytes(draft))
    extra = np.zeros(draft.layout.num_lanes)
    np.maximum.at(extra, lane, working)
    extra += memory.posted_bytes(draft)
    room = profile.job.planning_budget_bytes - memory.lane_state_bytes(draft.layout) - extra
    wait, need = rows_of(draft.dep_offsets), draft.dep_actions
    lane_set = components(draft.layout.num_lanes, lane[wait], lane[need])
    groups = chunk_groups(draft, assignment, lane_set[lane], 1 + int(lane_set.max()))
    chunk, first_group = groups.chunk, groups.first_group
    is_backward = draft.kind[:count].astype(np.int64)
    own_group = (groups.group - first_group[groups.chunk_set])[chunk]
    per_group = len(draft.model.modules) if by_module else 1
    return Segments(
        lane,
        is_backward,
        believed_durations(draft, profile),
        np.ceil(np.abs(change)).astype(np.int64),
        np.bincount(wait, minlength=count)[:count],
        *users_of(draft)[:2],
        lane_set,
        np.floor(room).astype(np.int64),
        own_group,
        own_group * per_group + (draft.module[:count] if by_module else 0),
        groups.rank[is_backward, chunk],
        np.diff(first_group),
        per_group,
    )
