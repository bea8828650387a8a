"""Cases of DIP: models, layouts and programs for its tests, and what is measured on them."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from entrain_bench.balancing.chunk_groups import split_by_label
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.costs.memory import Memory
from entrain_bench.program import Program, Slots, build_program
from entrain_bench.program.assignment import Assignment, ModuleAssignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.job import PLANNING_SHARE
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench_strategies.dip import DipScheduler
from entrain_bench_strategies.dip.partitioner import sub_microbatches
from entrain_bench_strategies.dip.scheduler import ChunkSegments, believed_s, build_segments
from support.braid import scheduled
from support.builders import placed, profile_of, random_samples, tiny_job, tiny_model

MODEL = tiny_model(encoder=2, llm=2)
MEMORY = Memory(MODEL)
seeds = st.integers(0, 2**32 - 1)


def program_of(
    layout: Layout,
    shapes: SampleShapes,
    assignment: Assignment,
    budget_bytes: float = 1e12,
    model: ModelSpec = MODEL,
    **knobs: str | int,
) -> Program:
    """DIP's program; without ``memory`` nothing is recomputed, without ``priorities`` microbatches are ordered."""
    job = tiny_job(model, budget_bytes=budget_bytes / PLANNING_SHARE)
    plain: dict[str, str | int] = {"memory": "module", "priorities": "microbatch"}
    scheduler = DipScheduler(**(plain | knobs))  # type: ignore[arg-type]
    return scheduler.schedule(shapes, layout, assignment, profile_of(job, shapes))


def random_cuts(rng: np.random.Generator, dp: int, count: int, most: int) -> tuple[SampleShapes, Assignment]:
    """Random samples in arrival order, their items cut into sub-microbatches."""
    shapes = random_samples(rng, 2 * dp * count, longest=2000)
    group = np.arange(len(shapes)) // 2
    owner = group[shapes.item_sample[MODEL.encoders[0].units(shapes)]]
    cut = ModuleAssignment(owner % dp, sub_microbatches(owner % dp, owner // dp, most))
    return shapes, Assignment((cut, ModuleAssignment(group % dp, group // dp)))


def peak_activations(layout: Layout, program: Program) -> FloatArray:
    return MEMORY.peak_bytes(program) - MEMORY.lane_state_bytes(layout)


def colocated(stages: int, dp: int = 1, chunks: int = 1, model: ModelSpec = MODEL) -> Layout:
    """Every module in ``chunks`` stages on each rank."""
    ranks = np.tile(np.arange(dp * stages).reshape(dp, stages, 1), (1, chunks, 1))
    return Layout(tuple(placed(module, ranks) for module in model.modules), 4)


def segments(layout: Layout, shapes: SampleShapes, assignment: Assignment) -> ChunkSegments:
    profile = profile_of(tiny_job(MODEL, budget_bytes=1e12), shapes)
    return build_segments(program_of(layout, shapes, assignment), assignment, profile)


def finish(slot: IntArray, layout: Layout, shapes: SampleShapes, assignment: Assignment) -> float:
    draft = program_of(layout, shapes, assignment)
    slots = [Slots(slot[draft.forward_actions(i)], slot[draft.backward_actions(i)]) for i in range(len(draft.chunks))]
    program = build_program(MODEL, layout, shapes, draft.chunks, slots)
    return believed_s(profile_of(tiny_job(MODEL), shapes), program)


def ends_by(found: ChunkSegments, group: IntArray, priority: FloatArray) -> FloatArray:
    """End of every set in the order of these groups and priorities ``[sets]``."""
    ends = []
    for one, own in enumerate(split_by_label(found.lane_set[found.actions.lanes], len(found.num_groups))):
        actions = found.actions.of(own, np.flatnonzero(found.lane_set == one))
        ends.append(scheduled(actions, group[own], priority[own])[1])
    return np.array(ends)


def ends_of(found: ChunkSegments, place: IntArray) -> FloatArray:
    """End of every set if its groups, as many in all, have these places in its order ``[sets]``."""
    group = place[found.group]
    return ends_by(found, group, group * float(len(group)) + found.rank)


def makespan_of(found: ChunkSegments, order: IntArray) -> float:
    """End of the only set if its elements, a module's part of a group each, are in this order."""
    groups = list(dict.fromkeys((order // found.per_group).tolist()))
    group = np.array([groups.index(one) for one in range(len(groups))])[found.group]
    priority = np.argsort(order)[found.element] * float(len(found.rank)) + found.rank
    return float(ends_by(found, group, priority).max())
