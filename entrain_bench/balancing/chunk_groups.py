"""Replicas of a program: lanes whose passes depend on each other, and the microbatches of these passes."""

from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from entrain_bench.balancing.listing import ListedActions, draft_actions, list_lanes
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arrays import FloatArray, IntArray, offsets_from_counts, rows_of
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment


def split_by_label(label: IntArray, num_labels: int) -> list[IntArray]:
    """Return the indices with each label, in rising order, one array per label."""
    bounds = np.cumsum(np.bincount(label, minlength=num_labels))[:-1]
    return np.split(np.argsort(label, kind="stable"), bounds)


def components(count: int, one: IntArray, other: IntArray) -> IntArray:
    """Return the connected component of each of ``count`` things, numbered by their least thing ``[count]``."""
    links = coo_array((np.ones(len(one), bool), (one, other)), shape=(count, count))
    return np.asarray(connected_components(links, directed=False)[1], np.int64)


@dataclass(frozen=True)
class Replica:
    """Lanes whose actions depend on each other, and these actions."""

    numbers: IntArray  # of the actions in the program ``[actions]``
    members: IntArray  # numbers of its lanes in the layout ``[lanes]``
    actions: ListedActions  # input of the list scheduler
    group: IntArray  # microbatch of each with all dependent actions, by arrival ``[actions]``
    # Place of each action's chunk in its group and pass. Forwards go by the first LLM microbatch that they serve, then
    # along the chain, backwards by the last, then against it ``[actions]``.
    rank: IntArray | FloatArray


def split_replicas(
    draft: Program,
    assignment: Assignment,
    profile: Profile,
    duration_s: FloatArray,
    size_bytes: FloatArray,
    working_bytes: FloatArray,
) -> list[Replica]:
    """Return the replicas of an assignment's program; the program's order does not matter.

    Of each action seconds, bytes that it adds or frees, and bytes that it needs while it runs ``[actions]``.
    """
    layout = draft.layout
    lane_offsets, lanes = list_lanes(draft)
    row = rows_of(lane_offsets)
    first_lane = lanes[lane_offsets[:-1]]
    most = np.zeros(layout.num_lanes)
    np.maximum.at(most, lanes, working_bytes[row])
    memory = profile.memory
    spare = profile.job.planning_budget_bytes - memory.lane_state_bytes(layout) - memory.posted_bytes(draft) - most
    wait = rows_of(draft.dep_offsets)
    lane_set = components(
        layout.num_lanes,
        np.concatenate([first_lane[wait], first_lane[row]]),
        np.concatenate([first_lane[draft.dep_actions], lanes]),
    )
    actions = draft_actions(
        draft,
        duration_s,
        np.ceil(np.abs(size_bytes)).astype(np.int64),
        np.floor(spare).astype(np.int64),
        components(layout.num_lanes, first_lane[row], lanes),
    )
    action_set = lane_set[first_lane]
    group, rank = _groups(draft, assignment, action_set)
    replicas = []
    for one, mine in enumerate(split_by_label(action_set, 1 + int(lane_set.max()))):
        if len(mine):
            members = np.flatnonzero(lane_set == one)
            replicas.append(Replica(mine, members, actions.of(mine, members), group[mine], rank[mine]))
    return replicas


def _groups(draft: Program, assignment: Assignment, action_set: IntArray) -> tuple[IntArray, IntArray]:
    """Group and rank of each forward and backward (``Replica``), from the set of lanes that it is on."""
    count = int(draft.first_action[-1])
    first_chunk = offsets_from_counts(np.array([len(chunks) for chunks in draft.chunks]))
    chunk = draft.chunk[:count].astype(np.int64) + first_chunk[draft.module[:count]]
    chunk_set = np.zeros(first_chunk[-1], np.int64)
    chunk_set[chunk] = action_set
    # First and last LLM microbatch whose samples a chunk holds.
    label = np.asarray(assignment.modules[draft.model.llm_index].microbatch)
    first_llm, last_llm = np.zeros((2, len(chunk_set)), np.int64)
    for module, rows, start in zip(draft.model.modules, draft.chunks, first_chunk, strict=False):
        if len(rows):
            microbatches = label[module.owners(draft.shapes, rows.members)]
            first_llm[start : start + len(rows)] = np.minimum.reduceat(microbatches, rows.offsets[:-1])
            last_llm[start : start + len(rows)] = np.maximum.reduceat(microbatches, rows.offsets[:-1])
    component = components(len(chunk_set), chunk[rows_of(draft.dep_offsets)], chunk[draft.dep_actions])
    arrival = np.full(int(component.max()) + 1, np.iinfo(np.int64).max)
    group_set = np.zeros(len(arrival), np.int64)
    np.minimum.at(arrival, component, first_llm)
    group_set[component] = chunk_set
    order = np.lexsort((arrival, group_set))
    group = np.argsort(order, kind="stable")[component]
    number = np.arange(len(group))
    first = offsets_from_counts(np.bincount(group))
    rank = np.empty((2, len(group)), np.int64)
    for row, keys in zip(rank, ((number, first_llm, group), (-number, last_llm, group)), strict=True):
        row[np.lexsort(keys)] = number - np.repeat(first[:-1], np.diff(first))
    first_group = offsets_from_counts(np.bincount(group_set, minlength=1 + int(action_set.max())))
    return (group - first_group[chunk_set])[chunk], rank[draft.kind[:count].astype(np.int64), chunk]
