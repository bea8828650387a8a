"""Layouts whose groups of ranks have several widths, and programs of packs that such groups run one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.recomputation import recompute_all, recompute_by_chunk
from entrain_bench.balancing.rounds import plane_layout
from entrain_bench.base.arrays import IntArray
from entrain_bench.program import Program, Slots, build_program
from entrain_bench.program.assignment import Assignment, group_chunks
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.job import Job, LayoutRequest
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.shapes import SampleShapes

# Ranks of a group, and ways to split layers among them.
GROUPS = (1, 2, 4, 8, 16, 32)
TENSOR_PARALLEL = (1, 2, 4, 8)


def layouts_with_widths(job: Job) -> Iterator[Layout]:
    """Layouts on all ranks with groups of any width that the request allows (``plane_degrees``).

    Encoders and generators are whole on every rank; the LLM's weights are whole or split over TP 2, 4, .... A requested
    TP is that of all groups of the LLM. Layouts with sharded weights (``plane_layout``) come last, in one round.
    """
    job = without_stages(job)
    num_ranks = job.cluster.num_ranks
    node = job.cluster.gpus_per_node
    asked = job.request.tp
    for least in plane_degrees(job, TENSOR_PARALLEL):
        modules = []
        for module in job.model.modules:
            is_llm = module is job.model.llm
            base = least if is_llm else 1
            widths = [
                (tp, width // tp)
                for width in GROUPS
                for tp in ((asked,) if asked and is_llm else TENSOR_PARALLEL)
                if width <= num_ranks and width % tp == tp % base == node % tp == 0 and splits(module, tp)
            ]
            if not widths or widths[0][0] * widths[0][1] > least:
                break
            ranks = np.arange(num_ranks).reshape(-1, 1, base)
            again = module.name in (job.request.recompute or ())
            modules.append(
                ModuleLayout(module.name, base, 1, (len(module.layers),), ranks, again, widths=tuple(widths))
            )
        else:
            yield Layout(tuple(modules), 1)
    whole = [(len(module.layers),) for module in job.model.modules]
    for tp in plane_degrees(job, TENSOR_PARALLEL) if job.framework.encoder_optimizers == 1 else ():
        positions = num_ranks // tp
        if positions & (positions - 1) or not all(splits(module, tp) for module in job.model.modules):
            continue
        recomputed = [module.name in (job.request.recompute or ()) for module in job.model.modules]
        yield plane_layout(job, tp, whole, False, recomputed, 1, sharded=True)


def without_stages(job: Job) -> Job:
    """The job as layouts without stages take it: a requested CP and DP together are all positions, so PP is 1."""
    asked = job.request
    return replace(job, request=replace(asked, pp=asked.pp or 1)) if asked.cp and asked.dp else job


def is_plane_fixed(request: LayoutRequest) -> bool:
    """Whether a request states all positions (TP groups) of one stage: as many as its DP x CP."""
    return bool(request.cp and request.dp and request.pp == 1)


def plane_degrees(job: Job, degrees: Sequence[int]) -> list[int]:
    """TP of the layouts without stages that a request allows, of some degrees; none if it asks for stages.

    One rule for all strategies without stages: a requested TP and PP hold for every group. A requested CP and DP are
    together the positions of a stage, which form CP groups of any width. One of them alone divides the positions.
    """
    asked = job.request
    num_ranks = job.cluster.num_ranks
    copies = (asked.dp or 1) * (asked.cp or 1)
    return [
        tp
        for tp in ([asked.tp] if asked.tp else degrees)
        if asked.pp in (None, 1)
        and job.cluster.gpus_per_node % tp == num_ranks % (tp * copies) == 0
        and (num_ranks == tp * copies or not is_plane_fixed(asked))
    ]


def splits(module: ModuleSpec, tp: int) -> bool:
    """Whether a tensor-parallel degree splits a module."""
    return all(size % tp == 0 for size in module.sharded_sizes.values())


def group_widths(layout: Layout) -> IntArray:
    """Ranks of the groups that packs may have, narrow to wide: those that every module can fill."""
    module_widths = [{tp * cp for tp, cp in placed.degrees} for placed in layout.modules]
    narrowest = max(min(widths) for widths in module_widths)
    return np.array(sorted(width for width in set().union(*module_widths) if width >= narrowest))


def packed_program(shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
    """Packs one after another: encoders, LLM and generators forward, then back; recomputed where memory is short."""
    model = profile.job.model
    labels = zip(model.modules, assignment.modules, strict=True)
    chunks = [group_chunks(module, shapes, labelled) for module, labelled in labels]
    slots = []
    for module, rows in zip(model.modules, chunks, strict=True):
        base = 6 * rows.microbatch.astype(np.int64)[:, None]
        depth = 0 if module.is_encoder else 1 if module is model.llm else 2
        slots.append(Slots(base + depth, base + 5 - depth))
    program = build_program(model, layout, shapes, chunks, slots)
    if profile.job.request.recompute is not None:
        return program
    if float(profile.memory.peak_bytes(program).max()) <= profile.job.planning_budget_bytes:
        return program
    return recompute_by_chunk(recompute_all(program), profile)
