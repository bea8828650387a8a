"""What DIP's search orders: the segments of a program, and the schedule that an order of microbatches leads to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import connected_components

from entrain_bench.arrays import FloatArray, IntArray, offsets_from_counts, rows_of
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment
from entrain_bench.strategy.profile import Profile

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
    lane_set = _components(draft.layout.num_lanes, lane[wait], lane[need])
    first_chunk = offsets_from_counts(np.array([len(chunks) for chunks in draft.chunks]))
    chunk = draft.chunk[:count].astype(np.int64) + first_chunk[draft.module[:count]]
    chunk_set = np.zeros(first_chunk[-1], np.int64)
    chunk_set[chunk] = lane_set[lane]
    first_llm, last_llm = _consumers(draft, assignment)
    group, group_set = _groups(_components(len(chunk_set), chunk[wait], chunk[need]), first_llm, chunk_set)
    rank = _ranks(group, first_llm, last_llm)
    first_group = offsets_from_counts(np.bincount(group_set, minlength=1 + int(lane_set.max())))
    is_backward = draft.kind[:count].astype(np.int64)
    own_group, per_group = (group - first_group[chunk_set])[chunk], len(draft.model.modules) if by_module else 1
    return Segments(
        lane,
        is_backward,
        believed_durations(draft, profile),
        np.ceil(np.abs(change)).astype(np.int64),
        np.bincount(wait, minlength=count)[:count],
        *_users(draft),
        lane_set,
        np.floor(room).astype(np.int64),
        own_group,
        own_group * per_group + (draft.module[:count] if by_module else 0),
        rank[is_backward, chunk],
        np.diff(first_group),
        per_group,
    )


def _users(draft: Program) -> tuple[IntArray, IntArray]:
    """Offsets and rows of the actions that wait for each action, CSR: the dependencies in reverse."""
    num_actions, links = len(draft.dep_offsets) - 1, np.ones(len(draft.dep_actions), np.int8)
    needs = csr_array((links, draft.dep_actions, draft.dep_offsets), shape=(num_actions, int(draft.first_action[-1])))
    users = needs.tocsc()
    return users.indptr.astype(np.int64), users.indices.astype(np.int64)


def _components(count: int, one: IntArray, other: IntArray) -> IntArray:
    """Connected component of each of ``count`` things that pairs link ``[count]``."""
    links = coo_array((np.ones(len(one)), (one, other)), shape=(count, count))
    return np.asarray(connected_components(links, directed=False)[1], np.int64)


def _consumers(draft: Program, assignment: Assignment) -> tuple[IntArray, IntArray]:
    """First and last LLM microbatch that a chunk of any module has to do with ``[all chunks]``."""
    label = np.asarray(assignment.modules[draft.model.llm_index].microbatch)
    first, last = [], []
    for module, rows in zip(draft.model.modules, draft.chunks, strict=True):
        if not len(rows):
            continue
        own = label[module.owners(draft.shapes, rows.members)]
        first.append(np.minimum.reduceat(own, rows.offsets[:-1]))
        last.append(np.maximum.reduceat(own, rows.offsets[:-1]))
    return np.concatenate(first), np.concatenate(last)


def _groups(component: IntArray, first_llm: IntArray, chunk_set: IntArray) -> tuple[IntArray, IntArray]:
    """Group of every chunk ``[chunks]`` and set of every group ``[groups]``, by set, then by first LLM microbatch."""
    num_groups = int(component.max()) + 1
    arrival, group_set = np.full(num_groups, np.iinfo(np.int64).max), np.zeros(num_groups, np.int64)
    np.minimum.at(arrival, component, first_llm)
    group_set[component] = chunk_set
    order = np.lexsort((arrival, group_set))
    group = np.empty(num_groups, np.int64)
    group[order] = np.arange(num_groups)
    return group[component], group_set[order]


def _ranks(group: IntArray, first_llm: IntArray, last_llm: IntArray) -> IntArray:
    """Place of each chunk's forward and backward in its group ``[2, chunks]``; arguments of chunks."""
    chunk = np.arange(len(group))
    first = offsets_from_counts(np.bincount(group))
    rank = np.empty((2, len(group)), np.int64)
    for row, keys in zip(rank, ((chunk, first_llm, group), (-chunk, last_llm, group)), strict=True):
        row[np.lexsort(keys)] = chunk - np.repeat(first[:-1], np.diff(first))
    return rank
