"""What DIP's search orders: the segments of a program, and the schedule that an order of microbatches leads to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from entrain_bench.arrays import FloatArray, IntArray, offsets_from_counts, rows_of
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment
from entrain_bench.strategy.profile import Profile

from .belief import believed_durations, lanes_of_actions
from .interleaver import Actions, interleave


@dataclass(frozen=True, slots=True)
class Segments:
    """The actions of a program, what they wait for, and the groups that the search puts in order.

    A *segment* is a forward or backward of a chunk through one stage on each rank (arXiv:2504.14145). Chunks that
    depend on each other are a *group*: a microbatch with its encoders' sub-microbatches. Lanes whose actions depend on
    each other are a *set*: a replica.

    Attributes:
        lane, is_backward, duration_s, size_bytes, chunk: of every action ``[actions]``; chunks count over all modules.
        num_waits: actions that each action waits for ``[actions]``.
        user_offsets, user_actions: actions that wait for each action, CSR.
        lane_set: set of each lane ``[lanes]``.
        room_bytes: room for activations ``[lanes]``.
        first_llm, last_llm: LLM microbatches that a chunk has to do with ``[chunks]``.
        group: group of each chunk ``[chunks]``; groups count by set, then by arrival.
        group_set: set of each group ``[groups]``.
    """

    lane: IntArray
    is_backward: IntArray
    duration_s: FloatArray
    size_bytes: IntArray
    chunk: IntArray
    num_waits: IntArray
    user_offsets: IntArray
    user_actions: IntArray
    lane_set: IntArray
    room_bytes: IntArray
    first_llm: IntArray
    last_llm: IntArray
    group: IntArray
    group_set: IntArray

    @property
    def num_sets(self) -> int:
        """Number of sets of lanes."""
        return 1 + int(self.lane_set.max())

    def schedule(self, place: IntArray) -> tuple[IntArray, FloatArray]:
        """The greedy interleaver's schedule under an order of the groups.

        The place of its group is a segment's priority; inside a group forwards go by the first LLM microbatch they
        serve, then along the chain, backwards by the last, then against the chain.

        Args:
            place: place of each group in its set's order, from 0 ``[groups]``.

        Returns:
            Slot of every action ``[actions]``, and the end of every set, seconds ``[sets]``.
        """
        place_of_chunk = place[self.group]
        chunks = np.arange(len(self.group))
        priority = np.empty((2, len(chunks)))
        priority[0, np.lexsort((chunks, self.first_llm, place_of_chunk))] = chunks
        priority[1, np.lexsort((-chunks, self.last_llm, place_of_chunk))] = chunks
        actions = Actions(
            lane=self.lane,
            is_backward=self.is_backward,
            duration_s=self.duration_s,
            priority=priority[self.is_backward, self.chunk],
            group=place_of_chunk[self.chunk],
            size_bytes=self.size_bytes,
            num_waits=self.num_waits,
            user_offsets=self.user_offsets,
            user_actions=self.user_actions,
        )
        slot, end, _ = interleave(actions, self.lane_set, self.room_bytes)
        finish = np.zeros(self.num_sets)
        np.maximum.at(finish, self.lane_set[self.lane], end)
        return slot, finish


def segments_of(draft: Program, assignment: Assignment, profile: Profile) -> Segments:
    """The segments of a program, whatever its own order."""
    memory = profile.memory
    count = int(draft.first_action[-1])
    lane = lanes_of_actions(draft)
    change, working = (values[:count] for values in memory.action_bytes(draft))
    extra = np.zeros(draft.layout.num_lanes)
    np.maximum.at(extra, lane, working)
    extra += memory.posted_bytes(draft)
    room = profile.job.planning_budget_bytes - memory.lane_state_bytes(draft.layout) - extra
    # Dependencies in reverse: what each action lets run.
    wait, need = rows_of(draft.dep_offsets), draft.dep_actions
    order = np.argsort(need, kind="stable")
    lane_set = _components(draft.layout.num_lanes, lane[wait], lane[need])
    first_chunk = offsets_from_counts(np.array([len(chunks) for chunks in draft.chunks]))
    chunk = draft.chunk[:count].astype(np.int64) + first_chunk[draft.module[:count]]
    chunk_set = np.zeros(first_chunk[-1], np.int64)
    chunk_set[chunk] = lane_set[lane]
    first_llm, last_llm = _consumers(draft, assignment)
    group, group_set = _groups(_components(len(chunk_set), chunk[wait], chunk[need]), first_llm, chunk_set)
    return Segments(
        lane,
        draft.kind[:count].astype(np.int64),
        believed_durations(draft, profile),
        np.ceil(np.abs(change)).astype(np.int64),
        chunk,
        np.bincount(wait, minlength=count)[:count],
        offsets_from_counts(np.bincount(need, minlength=count)),
        wait[order],
        lane_set,
        np.floor(room).astype(np.int64),
        first_llm,
        last_llm,
        group,
        group_set,
    )


def _components(count: int, one: IntArray, other: IntArray) -> IntArray:
    """Connected component of each of ``count`` things that pairs link ``[count]``."""
    links = coo_array((np.ones(len(one)), (one, other)), shape=(count, count))
    return np.asarray(connected_components(links, directed=False)[1], np.int64)


def _consumers(draft: Program, assignment: Assignment) -> tuple[IntArray, IntArray]:
    """First and last LLM microbatch that a chunk of any module has to do with ``[all chunks]``."""
    label = np.asarray(assignment.modules[-1].microbatch)
    first, last = [], []
    for module, rows in zip(draft.model.modules, draft.chunks, strict=True):
        if not len(rows):
            continue
        own = label[draft.shapes.item_sample[rows.members] if module.is_encoder else rows.members]
        first.append(np.minimum.reduceat(own, rows.offsets[:-1]))
        last.append(np.maximum.reduceat(own, rows.offsets[:-1]))
    return np.concatenate(first), np.concatenate(last)


def _groups(component: IntArray, first_llm: IntArray, chunk_set: IntArray) -> tuple[IntArray, IntArray]:
    """Group of every chunk ``[chunks]`` and set of every group ``[groups]``, by set, then by first LLM microbatch."""
    arrival = np.full(int(component.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(arrival, component, first_llm)
    keys, group = np.unique(np.stack([chunk_set, arrival[component], component]), axis=1, return_inverse=True)
    return group.ravel(), keys[0]
