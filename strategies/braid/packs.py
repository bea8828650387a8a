"""Packs of samples on groups of several widths: the deal that ends first, its packs, and labels of units."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np

from entrain_bench.balancing.chunk_estimates import packed_iteration_s
from entrain_bench.balancing.filling import lpt_with_exchange
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.rank_groups import room_bytes, step_assignment
from entrain_bench.balancing.width_layouts import group_widths, packed_program
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import FloatArray, IntArray, offsets_from_counts
from entrain_bench.base.errors import OutOfMemoryError
from entrain_bench.program.assignment import Assignment, ModuleAssignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes

from .deal import Deal, UnitWork, binned, dealt, estimate_work, labelled, priced

# Limits of a sample's time, as shares of what an even deal takes.
LIMITS = (0.12, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0)
# Share of the memory beside states that packs may keep; the rest is for what passes need while they run.
KEPT = 0.97
# Packs may keep so many times what there is room for, and recompute the rest: larger packs hide more of the traffic of
# weights and gradients. With sharded weights rounds are so many times as many as they could be.
STRETCHES = (1.0, 1.25, 1.6, 2.5)
# Deals, those that end first, whose programs are compared.
COMPARED = 2
# Which packs come first: factors of their width in the order.
WIDE, NARROW, SHARED = ORDERS = (-1, 1, 0)


def fastest_packs(
    shapes: SampleShapes, layout: Layout, profile: Profile, compare: bool = True
) -> tuple[float, Assignment]:
    """Of several deals, sizes of packs and orders those whose program ends first, and when by belief.

    Infinite if none fits memory. Without ``compare`` packs fit memory, wide ones come first. Sharded weights have
    rounds instead.
    """
    if layout.modules[0].sharded:
        return fastest_rounds(shapes, layout, profile)
    work = estimate_work(shapes, layout, profile)
    widths = group_widths(layout)
    room = KEPT * (profile.job.planning_budget_bytes - float(profile.memory.lane_state_bytes(layout).max()))
    seconds, kept, running = priced(work, widths, len(shapes), room)
    num_ranks = layout.modules[0].plane.shape[1]
    even_s = float(np.min(seconds * widths[:, None], axis=0).sum()) / num_ranks
    every_deal = (dealt(seconds, kept + running, widths, num_ranks, room, decisive(share * even_s)) for share in LIMITS)
    distinct = {(deal.width.tobytes(), deal.first.tobytes()): deal for deal in every_deal}
    deals = sorted(distinct.values(), key=lambda deal: decisive(deal.end_s))[: COMPARED if compare else 1]
    known: dict[tuple[int, bytes, int], tuple[float, Assignment]] = {}

    def end_s(index: int, stretch: float, first: int) -> float:
        deal = deals[index]
        chosen = np.searchsorted(widths, deal.width), np.arange(len(shapes))
        packs = place_packs(deal, seconds[chosen], kept[chosen], running[chosen], stretch * room, first)
        key = index, packs.tobytes(), first
        if key not in known:
            labels = label_units(packs, deal, work, layout)
            known[key] = ended_s(shapes, layout, labels, profile), labels
        return known[key][0]

    stretch = min(STRETCHES if compare else (1.0,), key=lambda factor: end_s(0, factor, WIDE))
    for index, deal in enumerate(deals):
        for first in ORDERS if compare and len(np.unique(deal.width)) > 1 else (WIDE,):
            end_s(index, stretch, first)
    return min(known.values(), key=lambda entry: entry[0])


def fastest_rounds(shapes: SampleShapes, layout: Layout, profile: Profile) -> tuple[float, Assignment]:
    """Rounds that all ranks begin together, as gathers of sharded weights need it, and when they end by belief.

    All have equal shares of encoders and LLM; a module's units go to the groups that end first. Of the least number of
    rounds, if they recompute all that they can, and of larger numbers that which ends first; infinite if none fits.
    """
    model = profile.job.model
    work = estimate_work(shapes, layout, profile)
    asked = profile.job.request.recompute is not None
    lean = replace(
        layout, modules=tuple(replace(placed, recompute=placed.recompute or not asked) for placed in layout.modules)
    )
    cost = np.zeros((len(shapes), 2))
    bytes_ = 0.0
    for index, module in enumerate(model.modules):
        row = int(work.first_degree[index])
        units = slice(*work.first_unit[index : index + 2])
        owner = module.owners(shapes, module.units(shapes))
        cost[:, int(module is model.llm)] += np.bincount(owner, work.seconds[row, units], len(shapes))
        bytes_ += float(work.lean_bytes[row, units].sum() * work.width[row])
    least = decisive(bytes_ / max(room_bytes(lean, profile) * layout.num_ranks, 1.0))
    best: tuple[float, Assignment] = np.inf, Assignment(())
    for count in dict.fromkeys(int(np.ceil(stretch * least)) for stretch in STRETCHES):
        with suppress(OutOfMemoryError):
            step = lpt_with_exchange(cost, min(count, len(shapes)))
            labels = step_assignment(shapes, lean, profile, [module.name for module in model.modules], step)
            best = min(best, (ended_s(shapes, layout, labels, profile), labels), key=lambda entry: entry[0])
    return best


def ended_s(shapes: SampleShapes, layout: Layout, labels: Assignment, profile: Profile) -> float:
    """When the program of labelled units ends by belief; infinite if it does not fit memory."""
    program = packed_program(shapes, layout, labels, profile)
    fits = float(profile.memory.peak_bytes(program).max()) <= profile.job.planning_budget_bytes
    return decisive(packed_iteration_s(program, profile)) if fits else np.inf


def label_units(place: IntArray, deal: Deal, work: UnitWork, layout: Layout) -> Assignment:
    """Group and pack of every unit of samples whose packs have these places ``[samples]``."""
    groups = [offsets_from_counts(placed.num_groups)[:-1] for placed in layout.modules]
    order = np.lexsort((place, deal.first, deal.width))
    key = np.stack([place, deal.first, deal.width])[:, order]
    start = np.flatnonzero(np.append(True, np.any(key[:, 1:] != key[:, :-1], axis=0)))
    offsets = np.append(start, len(order))
    labels = labelled(work, order, offsets, deal, key[0, start], np.concatenate(groups))
    modules = (slice(*work.first_unit[index : index + 2]) for index in range(len(groups)))
    return Assignment(tuple(ModuleAssignment(*(values[units] for values in labels)) for units in modules))


def place_packs(
    deal: Deal, seconds: FloatArray, bytes_: FloatArray, running: FloatArray, room: float, first: int
) -> IntArray:
    """Place of each sample's pack in the order in which ranks run them ``[samples]``.

    Of a group's packs the largest is last, to hide the reduction.

    Args:
        deal: where samples go.
        seconds: of each sample there ``[samples]``.
        bytes_: that it keeps on each rank ``[samples]``.
        running: bytes that its passes need while they run ``[samples]``.
        room: bytes of a pack, at most, unless a sample needs more.
        first: ``WIDE``: wide packs come first; ``NARROW``: narrow ones, so that wide packs, which take longest, hide
            the reduction; ``SHARED``: a rank's last packs of all widths share a place.
    """
    groups, group = np.unique(deal.width * (1 + deal.first.max()) + deal.first, return_inverse=True)
    most = np.zeros(len(groups))
    np.maximum.at(most, group, running)
    count = np.maximum(np.ceil(decisive(np.bincount(group, bytes_) / room)), 1).astype(np.int64)
    bin_of = binned(np.lexsort((-decisive(bytes_), group)), group, bytes_, room - most, count)
    bins, pack = np.unique(group * len(group) + bin_of, return_inverse=True)
    of_pack = bins // len(group)
    rising = np.lexsort((decisive(np.bincount(pack, seconds)), of_pack))
    place = np.zeros(len(bins), np.int64)
    place[rising] = np.arange(len(bins)) - np.cumsum(np.bincount(of_pack))[of_pack]
    width = np.zeros(len(bins), np.int64)
    width[pack] = first * deal.width
    _, position = np.unique(width * (1 - place.min()) + place, return_inverse=True)
    return np.asarray(position[pack])
