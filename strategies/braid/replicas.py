"""Actions of each replica with their estimates, as the list scheduler orders them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from entrain_bench.balancing.actions import BACKWARD, ListedActions
from entrain_bench.balancing.chunk_estimates import packed_durations, sync_after_s
from entrain_bench.balancing.chunk_groups import (
    chunk_groups,
    components,
    list_lanes,
    reverse_dependencies,
    split_by_label,
)
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import FloatArray, IntArray, rows_of
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment


@dataclass(frozen=True, slots=True)
class Replica:
    """Lanes whose actions depend on each other, and these actions.

    Attributes:
        numbers: of the actions in the program ``[actions]``.
        members: numbers of its lanes in the layout ``[lanes]``.
        actions: what the list scheduler knows of them.
        group: microbatch that each belongs to with all that depends on it, by arrival ``[actions]``.
        inner: place in the group and pass; forwards along the chain, backwards against it ``[actions]``.
        num_groups: how many microbatches it has.
        load_s: believed seconds of each on all lanes together ``[groups]``.
        floor_s: no schedule ends before the busiest lane has done its work.
        llm_backward_s: mean seconds of the LLM's backwards.
        held_s: seconds of each encoder backward, all of which may be held ``[encoder backwards]``.
    """

    numbers: IntArray
    members: IntArray
    actions: ListedActions
    group: IntArray
    inner: FloatArray
    num_groups: int
    load_s: FloatArray = field(init=False)
    floor_s: float = field(init=False)
    llm_backward_s: float = field(init=False)
    held_s: FloatArray = field(init=False)

    @property
    def most_bytes(self) -> FloatArray:
        """Bytes which the forwards of a group add to each lane at most ``[lanes]``."""
        row = rows_of(self.actions.lane_offsets)
        added = np.zeros((len(self.members), self.num_groups))
        size_bytes = self.actions.size_bytes * (1 - self.actions.is_backward)
        np.add.at(added, (self.actions.lanes, self.group[row]), size_bytes[row])
        return added.max(axis=1)

    def __post_init__(self) -> None:
        actions = self.actions
        counts = np.diff(actions.lane_offsets)
        least_s = actions.duration_s - actions.is_backward * actions.kept_s
        work = np.bincount(actions.lanes, np.repeat(least_s, counts), len(actions.room_bytes))
        of_group = np.bincount(self.group, actions.duration_s * counts, self.num_groups)
        object.__setattr__(self, "load_s", decisive(of_group))
        tail_s = np.full(len(work), np.inf)
        np.minimum.at(tail_s, actions.lanes, np.repeat(actions.tail_s, counts))
        object.__setattr__(self, "floor_s", float((work + tail_s).max()))
        of_llm = (actions.of_llm * actions.is_backward).astype(bool)
        object.__setattr__(self, "llm_backward_s", float(actions.duration_s[of_llm].mean()))
        object.__setattr__(self, "held_s", actions.duration_s[actions.of_llm < actions.is_backward])


def split_replicas(draft: Program, assignment: Assignment, profile: Profile) -> list[Replica]:
    """The replicas of a program, whatever its own order; the assignment is what it was made of."""
    layout = draft.layout
    count = int(draft.first_action[-1])
    lane_offsets, lanes = list_lanes(draft)
    row = rows_of(lane_offsets)
    believed, room_bytes = _believed(draft, profile, lanes, row)
    handed = profile.programs.handovers(draft)
    wait = rows_of(draft.dep_offsets)
    need = draft.dep_actions
    first_lane = lanes[lane_offsets[:-1]]
    station = components(layout.num_lanes, first_lane[row], lanes)
    links = np.concatenate([first_lane[wait], first_lane[row]]), np.concatenate([first_lane[need], lanes])
    lane_set = components(layout.num_lanes, *links)
    groups = chunk_groups(draft, assignment, lane_set[first_lane], 1 + int(lane_set.max()))
    chunk = groups.chunk
    first_group = groups.first_group
    is_backward = (draft.kind[:count] == BACKWARD).astype(np.int64)
    user_offsets, user_actions, edge = reverse_dependencies(draft)
    tail_s = sync_after_s(draft, profile)
    partner = np.arange(count)
    for index in range(len(draft.chunks)):
        partner[draft.forward_actions(index)] = draft.backward_actions(index)
    depth = np.where(is_backward, -1, 1) * draft.stage[:count] / float(max(placed.pp for placed in layout.modules))
    actions = ListedActions(
        **believed,
        lane_offsets=lane_offsets,
        lanes=lanes,
        is_backward=is_backward,
        of_llm=(draft.module[:count] >= draft.model.llm_index).astype(np.int64),
        send_s=handed.send_s[:count],
        receive_s=handed.receive_s[:count],
        num_waits=np.diff(draft.dep_offsets)[:count],
        user_offsets=user_offsets,
        user_actions=user_actions,
        user_delay_s=handed.delay_s[edge],
        station=station,
        room_bytes=room_bytes,
        tail_s=tail_s,
        backward=partner,
    )
    inner = groups.rank[is_backward, chunk] + depth
    replicas = []
    for one, lanes_of_set in enumerate(split_by_label(lane_set[first_lane], 1 + int(lane_set.max()))):
        if len(lanes_of_set):
            members = np.flatnonzero(lane_set == one)
            count = first_group[one + 1] - first_group[one]
            own_group = groups.group[chunk[lanes_of_set]] - first_group[one]
            replicas.append(
                Replica(lanes_of_set, members, actions.of(lanes_of_set, members), own_group, inner[lanes_of_set], count)
            )
    return replicas


def keeping(replicas: Sequence[Replica], plain: Program, frugal: Program, profile: Profile) -> list[Replica]:
    """The same replicas recomputing as ``frugal`` does, where the list scheduler may keep activations instead."""
    lane_offsets, lanes = list_lanes(frugal)
    believed, room_bytes = _believed(frugal, profile, lanes, rows_of(lane_offsets), plain)
    shorter = []
    for replica in replicas:
        decided = {name: values[replica.numbers] for name, values in believed.items()}
        actions = replica.actions._replace(**decided, room_bytes=room_bytes[replica.members])
        shorter.append(replace(replica, actions=actions))
    return shorter


def _believed(
    program: Program, profile: Profile, lanes: IntArray, row: IntArray, plain: Program | None = None
) -> tuple[dict[str, Any], IntArray]:
    """Recomputation's decisions on actions, by name, and ``room_bytes`` (``ListedActions``).

    Besides arguments as before lanes of all actions, and the action that each of them belongs to ``[entries]``.
    """
    memory = profile.memory
    count = int(program.first_action[-1])
    change, working = (values[:count] for values in memory.action_bytes(program))
    duration_s = packed_durations(program, profile)
    kept_bytes = np.zeros(count, np.int64)
    kept_s = np.zeros(count)
    if plain is not None:
        whole, more = (values[:count] for values in memory.action_bytes(plain))
        working = np.maximum(working, more)
        kept_bytes = np.ceil(np.maximum(np.abs(whole) - np.abs(change), 0.0)).astype(np.int64)
        kept_s = np.maximum(duration_s - packed_durations(plain, profile), 0.0)
    most = np.zeros(program.layout.num_lanes)
    np.maximum.at(most, lanes, working[row])
    extra = memory.posted_bytes(program)
    room = np.floor(profile.job.planning_budget_bytes - memory.lane_state_bytes(program.layout) - extra - most)
    size_bytes = np.ceil(np.abs(change)).astype(np.int64)
    decided = {"duration_s": duration_s, "size_bytes": size_bytes, "kept_bytes": kept_bytes, "kept_s": kept_s}
    return decided, room.astype(np.int64)
