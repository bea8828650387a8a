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
# Packs may keep so many times what there is room for, and recompute the rest: larger packs hide more of the traffic of
# weights and gradients.
STRETCHES = (1.0, 1.25, 1.6, 2.5)
# Deals, those that end first, whose programs are compared.
COMPARED = 2
# Which packs come first: factors of their width in the order.
WIDE, NARROW, SHARED = ORDERS = (-1, 1, 0)


def fastest_packs(
    shapes: SampleShapes, layout: Layout, profile: Profile, compare: bool = True
) -> tuple[float, Assignment]:
    """Of several deals, sizes of packs and orders those whose program ends first, and when by belief.

    Infinite if none fits memory. Without ``compare`` packs fit memory, wide ones come first.
    """
    work, widths = work_of(shapes, layout, profile), widths_of(layout)
    room = KEPT * (profile.job.planning_budget_bytes - float(profile.memory.lane_state_bytes(layout).max()))
    seconds, kept, running = priced(work, widths, len(shapes), room)
    num_ranks = layout.modules[0].plane.shape[1]
    even_s = float(np.min(seconds * widths[:, None], axis=0).sum()) / num_ranks
    found = (dealt(seconds, kept + running, widths, num_ranks, room, decisive(share * even_s)) for share in LIMITS)
    each = {(deal.width.tobytes(), deal.first.tobytes()): deal for deal in found}
    deals = sorted(each.values(), key=lambda deal: decisive(deal.end_s))[: COMPARED if compare else 1]
    known: dict[tuple[int, int, int], tuple[float, Assignment]] = {}

    def end_s(index: int, stretch: float, first: int) -> float:
        deal = deals[index]
        own = np.searchsorted(widths, deal.width), np.arange(len(shapes))
        packs = packs_of(deal, seconds[own], kept[own], running[own], stretch * room, first)
        key = index, len(packs), first
        if key not in known:
            labels = labels_of(packs, deal, work, layout)
            program = packed_program(shapes, layout, labels, profile)
            fits = float(profile.memory.peak_bytes(program).max()) <= profile.job.planning_budget_bytes
            known[key] = decisive(packed_iteration_s(program, profile)) if fits else np.inf, labels
        return known[key][0]

    stretch = min(STRETCHES if compare else (1.0,), key=lambda each: end_s(0, each, WIDE))
    for index, deal in enumerate(deals):
        for first in ORDERS if compare and len(np.unique(deal.width)) > 1 else (WIDE,):
            end_s(index, stretch, first)
    return min(known.values(), key=lambda each: each[0])


def labels_of(packs: Sequence[Pack], deal: Deal, work: Work, layout: Layout) -> Assignment:
    """Group and pack of every unit of the samples of each pack, whose order is the packs'."""
    first_group = [offsets_from_counts(placed.num_groups) for placed in layout.modules]
    counts, num_modules = np.diff(work.first_unit).tolist(), len(layout.modules)
    replica, number = ([np.zeros(count, np.int64) for count in counts] for _ in range(2))
    for index, samples in packs:
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


type Pack = tuple[int, IntArray]
"""Place in the order of packs, and samples."""


def packs_of(
    deal: Deal, seconds: FloatArray, bytes_: FloatArray, running: FloatArray, room: float, first: int
) -> list[Pack]:
    """Packs in the order in which ranks run them; of a group's packs the largest is last, to hide the reduction.

    Args:
        deal: where samples go.
        seconds: of each sample there ``[samples]``.
        bytes_: that it keeps on each rank ``[samples]``.
        running: bytes that its passes need while they run ``[samples]``.
        room: bytes of a pack, at most, unless a sample needs more.
        first: ``WIDE``: wide packs come first; ``NARROW``: narrow ones, so that wide packs, which take longest, hide
            the reduction; ``SHARED``: a rank's last packs of all widths share a place.
    """
    packs: list[tuple[tuple[int, int], IntArray]] = []
    groups, group = np.unique(np.stack([deal.width, deal.first]), axis=1, return_inverse=True)
    order = np.argsort(group.ravel(), kind="stable")
    for width, mine in zip(
        groups[0].tolist(), np.split(order, np.cumsum(np.bincount(group.ravel()))[:-1]), strict=True
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
            if count >= len(mine) or filled.max() + running[mine].max() <= room:
                break
            count += 1
        own_packs = sorted(
            (np.array(each) for each in bins if each), key=lambda each: decisive(float(seconds[each].sum()))
        )
        packs += [((first * width, place - len(own_packs)), each) for place, each in enumerate(own_packs)]
    places = {key: place for place, key in enumerate(sorted({key for key, _ in packs}))}
    return [(places[key], samples) for key, samples in packs]
