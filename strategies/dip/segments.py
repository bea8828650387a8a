"""Segments that DIP's search orders, with DIP's estimates of their times (arXiv:2504.14145)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entrain_bench.balancing.actions import ListedActions, single_lane_actions
from entrain_bench.balancing.chunk_estimates import covered_layer_s, packed_durations, stages_s
from entrain_bench.balancing.chunk_groups import chunk_groups, components, list_lanes, reverse_dependencies
from entrain_bench.balancing.planning import recompute_factor
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arrays import FloatArray, IntArray, rows_of
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment, Chunks
from entrain_bench.program.layout import ModuleLayout
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.shapes import SampleShapes


def chunk_s(
    module: ModuleSpec,
    placed: ModuleLayout,
    shapes: SampleShapes,
    chunks: Chunks,
    profile: Profile,
    remade: IntArray | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Estimated seconds of forward and backward of each chunk on each stage ``[chunks, stages]``.

    A chunk costs what its units cost alone; a module's time is shared out over stages as that of a unit of mean length.
    A backward takes two forwards, and one more if activations are recomputed; less where layers are frozen. Of layers
    that chunks recompute one by one (``remade``), the backward takes one more forward of these.
    """
    forward, share = stages_s(module, placed, shapes, chunks, profile)
    backward = forward * (3.0 * recompute_factor(placed.recompute) - 1.0) * share
    if remade is not None and not placed.recompute:
        backward = backward + remade * covered_layer_s(module, placed, shapes, chunks, profile)
    return forward, backward


def believed_s(profile: Profile, program: Program) -> float:
    """Believed time of a program up to its last backward, without transfers, seconds."""
    duration = np.zeros(program.num_actions)
    duration[: program.first_action[-1]] = packed_durations(program, profile, chunk_s)
    return float(profile.programs.simulate(program, duration).max())


@dataclass(frozen=True, slots=True)
class ChunkSegments:
    """The actions of a program, what they wait for, and the groups that the search puts in order.

    A *segment* is a forward or backward of a chunk through one stage on each rank (arXiv:2504.14145). Chunks that
    depend on each other are a *group*: a microbatch with the sub-microbatches of its encoders and generators. Lanes
    whose actions depend on each other are a *set*: a replica.

    Attributes:
        actions: of all sets.
        lane_set: set of each lane ``[lanes]``.
        group: group of each action, counted in its set by arrival ``[actions]``.
        element: what the search orders as one, counted likewise: the group, or the group's part of one module, of which
            ``per_group`` follow each other ``[actions]``.
        rank: place of each action's chunk in its group, of its pass ``[actions]``: forwards go by the first LLM
            microbatch they serve, then along the chain, backwards by the last, then against the chain.
        num_groups: groups of each set ``[sets]``.
    """

    actions: ListedActions
    lane_set: IntArray
    group: IntArray
    element: IntArray
    rank: IntArray
    num_groups: IntArray
    per_group: int


def build_segments(draft: Program, assignment: Assignment, profile: Profile, by_module: bool = False) -> ChunkSegments:
    """The segments of a program, whatever its own order; ``by_module``: a group's modules are elements of their own."""
    memory = profile.memory
    count = int(draft.first_action[-1])
    # Every block is one lane.
    _, lane = list_lanes(draft)
    change, working = (values[:count] for values in memory.action_bytes(draft))
    extra = np.zeros(draft.layout.num_lanes)
    np.maximum.at(extra, lane, working)
    extra += memory.posted_bytes(draft)
    room = profile.job.planning_budget_bytes - memory.lane_state_bytes(draft.layout) - extra
    wait = rows_of(draft.dep_offsets)
    need = draft.dep_actions
    lane_set = components(draft.layout.num_lanes, lane[wait], lane[need])
    groups = chunk_groups(draft, assignment, lane_set[lane], 1 + int(lane_set.max()))
    chunk = groups.chunk
    first_group = groups.first_group
    is_backward = draft.kind[:count].astype(np.int64)
    own_group = (groups.group - first_group[groups.chunk_set])[chunk]
    per_group = len(draft.model.modules) if by_module else 1
    actions = single_lane_actions(
        lane,
        is_backward,
        packed_durations(draft, profile, chunk_s),
        np.ceil(np.abs(change)).astype(np.int64),
        np.diff(draft.dep_offsets)[:count],
        *reverse_dependencies(draft)[:2],
        np.floor(room).astype(np.int64),
    )
    return ChunkSegments(
        actions,
        lane_set,
        own_group,
        own_group * per_group + (draft.module[:count] if by_module else 0),
        groups.rank[is_backward, chunk],
        np.diff(first_group),
        per_group,
    )
