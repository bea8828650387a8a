"""Cases of DIP: models, layouts and programs for its tests, and what is measured on them."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from entrain_bench.balancing.chunk_groups import Replica
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.costs.memory import Memory
from entrain_bench.program import Program, Slots, build_program
from entrain_bench.program.assignment import Assignment, ModuleAssignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.job import PLANNING_SHARE
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench_strategies.dip import DipScheduler, believed_s, listed_replicas, sub_microbatches
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


def replicas_of(
    layout: Layout, shapes: SampleShapes, assignment: Assignment, model: ModelSpec = MODEL
) -> tuple[Program, list[Replica]]:
    profile = profile_of(tiny_job(model, budget_bytes=1e12), shapes)
    draft = program_of(layout, shapes, assignment, model=model, search_rounds=0)
    return draft, listed_replicas(draft, assignment, profile)


def finish(slot: IntArray, layout: Layout, shapes: SampleShapes, assignment: Assignment) -> float:
    draft = program_of(layout, shapes, assignment)
    slots = [Slots(slot[draft.forward_actions(i)], slot[draft.backward_actions(i)]) for i in range(len(draft.chunks))]
    program = build_program(MODEL, layout, shapes, draft.chunks, slots)
    return believed_s(profile_of(tiny_job(MODEL), shapes), program)


def end_of(replica: Replica, place: IntArray) -> float:
    """End of a replica whose groups have these places in its order."""
    group = place[replica.group]
    return scheduled(replica.actions, group, group * float(len(group)) + replica.rank)[1]


def makespan_of(replica: Replica, order: IntArray, module: IntArray) -> float:
    """End of a replica whose elements, a module's part of a group each, are in this order."""
    per_group = 1 + int(module.max())
    groups = list(dict.fromkeys((order // per_group).tolist()))
    group = np.argsort(groups)[replica.group]
    element = replica.group * per_group + module[replica.numbers]
    return scheduled(replica.actions, group, np.argsort(order)[element] * float(len(group)) + replica.rank)[1]
