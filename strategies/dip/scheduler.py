"""DIP's schedule: segments of all modules interleaved on every rank, by believed durations (arXiv:2504.14145)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from entrain_bench.arrays import FloatArray, IntArray, offsets_from_counts, rows_of
from entrain_bench.assignment import Assignment
from entrain_bench.costs.memory import Memory
from entrain_bench.errors import IncompatibleError, require, unknown_choice
from entrain_bench.layout import Layout
from entrain_bench.profile import Profile
from entrain_bench.program import Program, Slots, build_program
from entrain_bench.schedules import chain_chunks, three_phase_program
from entrain_bench.shapes import SampleShapes
from strategies.dip.belief import believed_durations, lanes_of_actions
from strategies.dip.interleaver import interleave

ORDERS = ("interleave", "phases")
# A search step moves some segments by about so many microbatches.
MOVED_SHARE = 0.1
MOVED_GROUPS = 2.0


@dataclass(frozen=True, slots=True)
class DipScheduler:
    """Orders the actions of every rank.

    Attributes:
        order: ``interleave``, DIP's greedy dual-queue order, or ``phases``, the plain order that arXiv:2605.27918
            compares with: all encoder forwards, the LLM's 1F1B, all encoder backwards.
        search_rounds: random changes of segment priorities tried; of each replica the best believed order is kept.
    """

    order: str = "interleave"
    search_rounds: int = 0

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise unknown_choice("strategy.scheduler.order", self.order, ORDERS)
        require(self.search_rounds >= 0, "strategy.scheduler.search_rounds", self.search_rounds, "at least 0")

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """The program.

        Raises:
            IncompatibleError: for an interleaved order if a stage spans several lanes (modules that share some ranks
                with different TP or CP), for the interleaver gives each action one lane.
        """
        model = profile.job.model
        if self.order == "phases":
            return three_phase_program(model, shapes, layout, assignment)
        if any(np.any(np.diff(blocks.offsets) != 1) for blocks in layout.blocks):
            raise IncompatibleError(
                "strategy.scheduler: DIP's interleaver needs one TP x CP for modules on the same ranks"
            )
        chunks = chain_chunks(model, shapes, layout, assignment, split_backward=False)
        empty = [
            np.zeros((len(rows), placed.pp), np.int64) for rows, placed in zip(chunks, layout.modules, strict=True)
        ]
        # Actions and dependencies do not depend on slots.
        draft = build_program(model, layout, shapes, chunks, [Slots(each, each) for each in empty])
        slot = _search(draft, assignment, profile, self.search_rounds)
        slots = [
            Slots(slot[draft.forward_actions(index)], slot[draft.backward_actions(index)])
            for index in range(len(chunks))
        ]
        return build_program(model, layout, shapes, chunks, slots)


def _search(draft: Program, assignment: Assignment, profile: Profile, rounds: int) -> IntArray:
    """Slot of every action: the interleaver's, or the best of some with perturbed priorities, replica by replica."""
    memory = Memory(profile.job.model, profile.job.distributed_optimizer)
    count = int(draft.first_action[-1])
    lane, duration = lanes_of_actions(draft), believed_durations(draft, profile)
    change, working = (values[:count] for values in memory.action_bytes(draft))
    kind = draft.kind[:count].astype(np.int64)
    extra = np.zeros(draft.layout.num_lanes)
    np.maximum.at(extra, lane, working)
    room = profile.job.planning_budget_bytes - memory.lane_state_bytes(draft.layout) - extra
    size = np.ceil(np.abs(change)).astype(np.int64)
    # Actions in reverse: what each one lets run.
    wait, need = rows_of(draft.dep_offsets), draft.dep_actions
    order = np.argsort(need, kind="stable")
    user_offsets = offsets_from_counts(np.bincount(need, minlength=count))
    num_waits = np.bincount(wait, minlength=count)[:count]
    lanes = draft.layout.num_lanes
    links = coo_array((np.ones(len(wait)), (lane[wait], lane[need])), shape=(lanes, lanes))
    num_sets, lane_set = connected_components(links, directed=False)
    segment = _segments(draft)
    first_llm, last_llm = _consumers(draft, assignment)
    group = _groups(segment, wait, need, first_llm, lane_set[lane])
    base = _priorities(segment, group, first_llm, last_llm)

    def run(priority: FloatArray) -> tuple[IntArray, FloatArray]:
        slot, end, _ = interleave(
            lane,
            kind,
            duration,
            priority[kind, segment],
            group,
            size,
            num_waits,
            user_offsets,
            wait[order],
            lane_set.astype(np.int64),
            np.floor(room).astype(np.int64),
            int(group.max()) + 1,
        )
        finish = np.zeros(num_sets)
        np.maximum.at(finish, lane_set[lane], end)
        return slot, finish

    slot, best = run(base)
    # One stream of moves for every iteration: the same batch always gets the same order.
    rng = np.random.default_rng(0)
    set_of_segment = np.zeros(base.shape[1], np.int64)
    set_of_segment[segment] = lane_set[lane]
    reach = MOVED_GROUPS * base.shape[1] / max(1, num_sets * (int(group.max()) + 1))
    for _ in range(rounds):
        moved = base + reach * rng.standard_normal(base.shape) * (rng.random(base.shape) < MOVED_SHARE)
        tried, finish = run(moved)
        better = finish < best
        slot = np.where(better[lane_set[lane]], tried, slot)
        base = np.where(better[set_of_segment], moved, base)
        best = np.minimum(best, finish)
    return slot


def _segments(draft: Program) -> IntArray:
    """Number of the chunk of every action, counted over all modules ``[actions]``."""
    count = int(draft.first_action[-1])
    first = offsets_from_counts(np.array([len(chunks) for chunks in draft.chunks]))
    return draft.chunk[:count].astype(np.int64) + first[draft.module[:count]]


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


def _groups(segment: IntArray, wait: IntArray, need: IntArray, first_llm: IntArray, lane_set: IntArray) -> IntArray:
    """Group of every action: chunks that depend on each other, numbered by LLM microbatch within each lane set."""
    num_chunks = len(first_llm)
    links = coo_array((np.ones(len(wait)), (segment[wait], segment[need])), shape=(num_chunks, num_chunks))
    num_groups, group = connected_components(links, directed=False)
    place, owner = np.full(num_groups, np.iinfo(np.int64).max), np.zeros(num_groups, np.int64)
    np.minimum.at(place, group, first_llm)
    owner[group[segment]] = lane_set
    order = np.lexsort((place, owner))
    number = np.empty(num_groups, np.int64)
    number[order] = np.arange(num_groups) - np.searchsorted(owner[order], owner[order])
    return np.asarray(number[group][segment])


def _priorities(segment: IntArray, group: IntArray, first_llm: IntArray, last_llm: IntArray) -> FloatArray:
    """Priority of every chunk's forward and backward, lower first ``[passes, all chunks]``.

    Groups in order; inside one, forwards by the first LLM microbatch they serve, backwards by the last; then by module.
    """
    chunk_group = np.zeros(len(first_llm), np.int64)
    chunk_group[segment] = group
    number = np.arange(len(first_llm))
    result = np.empty((2, len(number)))
    keys: Sequence[tuple[IntArray, ...]] = ((number, first_llm, chunk_group), (-number, last_llm, chunk_group))
    for row, key in zip(result, keys, strict=True):
        row[np.lexsort(key)] = number
    return result
