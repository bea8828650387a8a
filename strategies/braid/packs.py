"""Packs of samples on groups of several widths: the deal that ends first, its packs, and labels of units."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from entrain_bench.balancing.beliefs import packed_iteration_s
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.widths import packed_program, widths_of
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import FloatArray, IntArray, offsets_from_counts
from entrain_bench.program.assignment import Assignment, ModuleAssignment
from entrain_bench.program.layout import Layout
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
    return labels_of(packs_of(chosen, bytes_[own], seconds[own], room), chosen, work, layout)


def believed_s(shapes: SampleShapes, layout: Layout, profile: Profile) -> float:
    """Believed seconds of the program of a batch; infinite if its packs do not fit memory."""
    program = packed_program(shapes, layout, pack_assignment(shapes, layout, profile), profile)
    if float(profile.memory.peak_bytes(program).max()) > profile.job.planning_budget_bytes:
        return np.inf
    return packed_iteration_s(program, profile)


def labels_of(packs: Sequence[IntArray], deal: Deal, work: Work, layout: Layout) -> Assignment:
    """Group and pack of every unit of the samples of each pack, whose order is the packs'."""
    first_group = [offsets_from_counts(placed.num_groups) for placed in layout.modules]
    counts, num_modules = np.diff(work.first_unit).tolist(), len(layout.modules)
    replica, number = ([np.zeros(count, np.int64) for count in counts] for _ in range(2))
    for index, samples in enumerate(packs):
        width, first = int(deal.width[samples[0]]), int(deal.first[samples[0]])
        for module, placed in enumerate(layout.modules):
            found = split(work, samples, module, num_modules, width)
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
