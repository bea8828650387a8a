"""Packs of samples on groups of several widths: labels of units, the order of packs, and their program."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from entrain_bench.balancing.beliefs import packed_iteration_s
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.recomputation import recompute_all, recompute_by_chunk
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import FloatArray, IntArray, offsets_from_counts
from entrain_bench.program import Program, Slots, build_program
from entrain_bench.program.assignment import Assignment, ModuleAssignment, group_chunks
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.job import Job
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.shapes import SampleShapes

from .deal import Deal, Work, dealt, priced, split, work_of

# Limits of a sample's time, as shares of what an even deal takes.
LIMITS = (0.12, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0)
# Share of the memory beside states that packs may keep; the rest is for what passes need while they run.
KEPT = 0.97


def pack_assignment(shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
    """Labels of all units: the deal that ends first by belief, its samples in as few packs as memory has room for."""
    work, widths = work_of(shapes, layout, profile), widths_of(layout)
    room = KEPT * (profile.job.planning_budget_bytes - float(profile.memory.lane_state_bytes(layout).max()))
    seconds, bytes_ = priced(work, widths, len(shapes), room)
    num_ranks = layout.modules[0].plane.shape[1]
    ideal_s = float(np.min(seconds * widths[:, None], axis=0).sum()) / num_ranks
    deals = [dealt(seconds, bytes_, widths, num_ranks, room, decisive(share * ideal_s)) for share in LIMITS]
    chosen = deals[int(decisive(np.array([deal.end_s for deal in deals])).argmin())]
    own = np.searchsorted(widths, chosen.width), np.arange(len(shapes))
    return labelled(shapes, layout, profile, work, chosen, bytes_[own], seconds[own], room)


def layouts_with_widths(job: Job) -> Iterator[Layout]:
    """Layouts on all ranks in which a group of any width may take a sample.

    Encoders and generators are whole on every rank; the LLM's weights are whole or split over TP 2, 4, ....
    """
    num_ranks, node = job.cluster.num_ranks, job.cluster.gpus_per_node
    for least in (tp for tp in (1, 2, 4, 8) if node % tp == 0 and num_ranks % tp == 0):
        modules = []
        for module in job.model.modules:
            base = least if module is job.model.llm else 1
            widths = [
                (tp, width // tp)
                for width in (1, 2, 4, 8, 16, 32)
                for tp in (1, 2, 4, 8)
                if width <= num_ranks and width % tp == tp % base == node % tp == 0 and splits(module, tp)
            ]
            if not widths or widths[0][0] * widths[0][1] > least:
                break
            ranks = np.arange(num_ranks).reshape(-1, 1, base)
            modules.append(ModuleLayout(module.name, base, 1, (len(module.layers),), ranks, widths=tuple(widths)))
        else:
            yield Layout(tuple(modules), 1)


def splits(module: ModuleSpec, tp: int) -> bool:
    """Whether a tensor-parallel degree splits a module."""
    return all(size % tp == 0 for size in module.sharded_sizes.values())


def believed_s(shapes: SampleShapes, layout: Layout, profile: Profile) -> float:
    """Believed seconds of the program of a batch; infinite if its packs do not fit memory."""
    program = packed_program(shapes, layout, pack_assignment(shapes, layout, profile), profile)
    if float(profile.memory.peak_bytes(program).max()) > profile.job.planning_budget_bytes:
        return np.inf
    return packed_iteration_s(program, profile)


def widths_of(layout: Layout) -> IntArray:
    """Ranks of the groups that packs may have, narrow to wide: those that every module can fill."""
    own = [{tp * cp for tp, cp in placed.degrees} for placed in layout.modules]
    narrowest = max(min(each) for each in own)
    return np.array(sorted(width for width in set().union(*own) if width >= narrowest))


def labelled(
    shapes: SampleShapes,
    layout: Layout,
    profile: Profile,
    work: Work,
    deal: Deal,
    bytes_: FloatArray,
    seconds: FloatArray,
    room: float,
) -> Assignment:
    """Group and pack of every unit.

    Args:
        shapes, layout, profile: of the batch.
        work: its believed work.
        deal: groups of samples.
        bytes_: what each sample needs on a rank of its group ``[samples]``.
        seconds: what it takes on its own ``[samples]``.
        room: what a pack may keep on a rank.
    """
    modules = profile.job.model.modules
    packs = packs_of(deal, bytes_, seconds, room)
    replica = [np.zeros(len(module.units(shapes)), np.int64) for module in modules]
    number = [np.zeros(len(module.units(shapes)), np.int64) for module in modules]
    first_group = [offsets_from_counts(placed.num_groups) for placed in layout.modules]
    for index, samples in enumerate(packs):
        width, first = int(deal.width[samples[0]]), int(deal.first[samples[0]])
        for module, placed in enumerate(layout.modules):
            found = split(work, samples, module, len(modules), width)
            if found is None:
                continue
            degree, units, place = found
            own = int(np.prod(placed.degrees[degree]))
            replica[module][units] = first_group[module][degree] + first // own + place
            number[module][units] = index
    return Assignment(tuple(ModuleAssignment(*each) for each in zip(replica, number, strict=True)))


def packs_of(deal: Deal, bytes_: FloatArray, seconds: FloatArray, room: float) -> list[IntArray]:
    """Samples of each pack, in the order in which ranks run them.

    Wide packs first; of a group's packs the largest last, for gradients of its weights are reduced beside it.
    """
    packs: list[tuple[tuple[float, ...], IntArray]] = []
    groups, group = np.unique(np.stack([deal.width, deal.first]), axis=1, return_inverse=True)
    order = np.argsort(group.ravel(), kind="stable")
    for (width, first), mine in zip(
        groups.T.tolist(), np.split(order, np.cumsum(np.bincount(group.ravel()))[:-1]), strict=True
    ):
        held = bytes_[mine]
        falling = mine[np.argsort(-decisive(held), kind="stable")]
        count = max(1, int(np.ceil(decisive(held.sum() / room))))
        while True:
            bins: list[list[int]] = [[] for _ in range(count)]
            filled = np.zeros(count)
            for sample in falling.tolist():
                own = int(filled.argmin())
                bins[own].append(sample)
                filled[own] += bytes_[sample]
            if count >= len(mine) or filled.max() <= room:
                break
            count += 1
        own_packs = sorted(
            (np.array(each) for each in bins if each), key=lambda each: decisive(float(seconds[each].sum()))
        )
        packs += [((-width, place, first), each) for place, each in enumerate(own_packs)]
    return [samples for _, samples in sorted(packs, key=lambda each: each[0])]


def packed_program(shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
    """Packs one after another: encoders, LLM and generators forward, then back; recomputed where memory is short."""
    model = profile.job.model
    labels = zip(model.modules, assignment.modules, strict=True)
    chunks = [group_chunks(module, shapes, own) for module, own in labels]
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
