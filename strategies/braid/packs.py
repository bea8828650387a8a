"""Packs of samples on groups of several widths: the deal that ends first, its packs, and labels of units.

A pack is what a group of ranks takes through encoder, LLM and back before it goes on. Wide packs come first, so that
narrower groups nest inside them. In a pack every module chooses a width of its own, at most the pack's.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from entrain_bench.balancing.chunk_estimates import packed_iteration_s, packed_units_s
from entrain_bench.balancing.lpt import aligned_first, lpt_with_exchange
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.rank_groups import room_bytes, step_assignment, unit_costs
from entrain_bench.balancing.rounds import group_widths, packed_program
from entrain_bench.base.arithmetic import decisive, matmul
from entrain_bench.base.arrays import FloatArray, IntArray, offsets_from_counts
from entrain_bench.base.compiled import njit
from entrain_bench.base.errors import OutOfMemoryError
from entrain_bench.program.assignment import Assignment, ModuleAssignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes

# Exchanges with the busiest rank, at most.
EXCHANGES = 400
# Limits of a sample's time, as shares of what an even deal takes.
LIMITS = (0.12, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0)
# Share of the memory beside states that packs may keep; the rest is for what passes need while they run.
KEPT = 0.97
# Packs may keep so many times what there is room for, and recompute the rest: larger packs hide more traffic. With
# sharded weights rounds are so many times as many as they could be.
STRETCHES = (1.0, 1.25, 1.6, 2.5)
# Deals, those that end first, whose programs are compared.
COMPARED = 2


class UnitWork(NamedTuple):
    """Estimated times and bytes of all modules' units at every width, in module order."""

    width: IntArray  # ranks of a group at each degree of every module ``[degrees]``
    first_degree: IntArray  # first degree of each module ``[modules + 1]``
    # Seconds of both passes and of recomputation, bytes kept on each rank, kept if all that can be is recomputed, and
    # needed while a pass runs ``[5, degrees, units]``.
    units: FloatArray
    chunk_s: FloatArray  # what a pack costs besides ``[degrees]``
    first_unit: IntArray  # first unit of each module ``[modules + 1]``
    # Units of each sample and module, CSR ``[samples * modules + 1]``.
    offsets: IntArray
    members: IntArray


def estimate_work(shapes: SampleShapes, layout: Layout, profile: Profile) -> UnitWork:
    """Believed work of a batch at all widths of a layout, by the profile's estimates."""
    modules = profile.job.model.modules
    llm = profile.job.model.llm_index
    asked = profile.job.request.recompute is not None
    hidden_bytes = 2.0 * profile.job.model.llm.config.hidden_size
    first_unit = offsets_from_counts(np.array([len(module.units(shapes)) for module in modules]))
    first_degree = offsets_from_counts(np.array([len(placed.degrees) for placed in layout.modules]))
    added = np.zeros((5, int(first_degree[-1]), int(first_unit[-1])))
    seconds, again_s, bytes_, lean, running = added
    chunk_s = np.zeros(int(first_degree[-1]))
    width = np.zeros(int(first_degree[-1]), np.int64)
    owners = []
    for index, (module, placed) in enumerate(zip(modules, layout.modules, strict=True)):
        mine = slice(int(first_unit[index]), int(first_unit[index + 1]))
        lengths = module.lengths(shapes, module.units(shapes))
        owners.append(module.owners(shapes, module.units(shapes)) * len(modules) + index)
        remade = module.kind_counts(placed.layers_per_stage)[0] * [kind.remade_share for kind in module.kinds]
        rows = slice(int(first_degree[index]), int(first_degree[index + 1]))
        seconds[rows, mine], _, chunk_s[rows] = unit_costs(module, placed, shapes, profile)
        for degree, (tp, cp) in enumerate(placed.degrees):
            row = int(first_degree[index]) + degree
            width[row] = tp * cp
            again_s[row, mine] = matmul(packed_units_s(module, shapes, tp, cp, profile)[0], remade) * (not asked)
            for held, recompute in ((bytes_, placed.recompute), (lean, placed.recompute or not asked)):
                kept, extra = profile.memory.token_bytes(module, replace(placed.at(degree), recompute=recompute))
                held[row, mine] = lengths * (float(kept[0]) + (index == llm) * hidden_bytes)
            running[row, mine] = lengths * (float(extra[0]) + (index == llm) * 2 * hidden_bytes)
    key = np.concatenate(owners)
    offsets = offsets_from_counts(np.bincount(key, minlength=len(shapes) * len(modules)))
    return UnitWork(width, first_degree, added, chunk_s, first_unit, offsets, np.argsort(key, kind="stable"))


class Deal(NamedTuple):
    """Where samples go."""

    width: IntArray  # of each sample's group ``[samples]``
    first: IntArray  # first rank of its group, among those of a stage ``[samples]``
    end_s: float  # when the last rank is done, by belief


def priced(work: UnitWork, widths: IntArray, num_samples: int, room_bytes: float) -> tuple[FloatArray, ...]:
    """Seconds, kept and running bytes of each sample as a pack ``[widths, samples]``, recomputing what has no room."""
    seconds, again_s, held, lean, running = _priced(work, widths, num_samples)
    share = np.clip((held + running - room_bytes) / np.maximum(held - lean, 1.0), 0.0, 1.0)
    return seconds + share * again_s, held - share * (held - lean), running


def dealt(
    seconds: FloatArray, bytes_: FloatArray, widths: IntArray, num_ranks: int, room_bytes: float, limit_s: float
) -> Deal:
    """Samples on groups if none takes longer than ``limit_s`` where width or memory can help ``[widths, samples]``."""
    fits = np.where(bytes_ <= room_bytes, decisive(seconds), np.inf)
    good = np.isfinite(fits) & (fits <= limit_s)
    level = np.where(good, decisive(seconds * widths[:, None]), np.inf).argmin(axis=0)
    fallback = np.where(np.isfinite(fits).any(axis=0), fits.argmin(axis=0), len(widths) - 1)
    level = np.where(good.any(axis=0), level, fallback)
    mine = decisive(seconds[level, np.arange(seconds.shape[1])])
    order = np.lexsort((np.arange(len(mine)), -mine, -level))
    first, load = aligned_first(order, widths[level], mine, num_ranks)
    narrow = np.flatnonzero(level == 0)
    groups = num_ranks // int(widths[0])
    narrow_group = first[narrow] // int(widths[0])
    start = load.reshape(groups, -1).max(axis=1) - np.bincount(narrow_group, mine[narrow], groups)
    narrow_group, end_s = _exchanged(narrow_group, mine[narrow], start, EXCHANGES)
    first[narrow] = narrow_group * int(widths[0])
    return Deal(widths[level], first, float(end_s))


@njit()
def _span(seconds, count, place):  # type: ignore[no-untyped-def]
    """Busiest of so many groups if units go, longest first, to the least loaded; their groups go to ``place``."""
    load = np.zeros(min(count, len(seconds)))
    # A lone group takes them as they come.
    order = np.arange(len(seconds)) if len(load) == 1 else np.argsort(-seconds, kind="mergesort")
    for index in order:
        place[index] = load.argmin()
        load[place[index]] += seconds[index]
    return load.max()


@njit()
def _split(units, work, module, most, shared=False):  # type: ignore[no-untyped-def]
    """Degree of a module at which units are through first in a pack of a width, when, and the group of each unit there.

    If a pack is ``shared`` with many others, groups of a narrower width share all units evenly.
    """
    best = -1
    best_s = np.inf
    chosen, place = np.zeros((2, len(units)), np.int64)
    for degree in range(work.first_degree[module], work.first_degree[module + 1]):
        if work.width[degree] > most:
            continue
        count = most // work.width[degree]
        seconds = work.units[0, degree][units]
        span = _span(seconds, count, place) + work.chunk_s[degree]
        if shared:
            span = 0.0
            for unit_s in seconds:
                span += unit_s / count
        if span < best_s * (1 - 1e-9):
            best = degree
            best_s = span
            chosen[:] = place
    return best, best_s, chosen


@njit()
def labelled(work, order, offsets, width, first, place, first_group):  # type: ignore[no-untyped-def]
    """Group and pack of every unit ``[units]``: a pack's units of a module take the degree that is through first.

    ``order`` has the samples pack after pack, from ``offsets`` on; a pack has a place, a degree a first group.
    """
    replica, number, members = np.zeros((3, len(work.members)), np.int64)
    modules = len(work.first_degree) - 1
    for pack in range(len(place)):
        samples = order[offsets[pack] : offsets[pack + 1]]
        for module in range(modules):
            count = 0
            for row in samples * modules + module:
                more = work.offsets[row + 1] - work.offsets[row]
                members[count : count + more] = work.members[work.offsets[row] : work.offsets[row + 1]]
                count += more
            if count > 0:
                best, _, where = _split(members[:count], work, module, width[samples[0]])
                replica[members[:count]] = first_group[best] + first[samples[0]] // work.width[best] + where
                number[members[:count]] = place[pack]
    return replica, number


@njit()
def binned(order, group, bytes_, room, count):  # type: ignore[no-untyped-def]
    """Bin of each sample within its group, which follow each other: each to the least filled of so few that all fit."""
    chosen = np.zeros(len(order), np.int64)
    low = 0
    while low < len(order):
        current = group[order[low]]
        high = low
        while high < len(order) and group[order[high]] == current:
            high += 1
        bins = count[current]
        while True:
            filled = np.zeros(bins)
            for sample in order[low:high]:
                least = filled.argmin()
                chosen[sample] = least
                filled[least] += bytes_[sample]
            if bins >= high - low or filled.max() <= room[current]:
                break
            bins += 1
        low = high
    return chosen


@njit()
def _priced(work, widths, num_samples):  # type: ignore[no-untyped-def]
    """Of each sample on each width what ``UnitWork.units`` says of units ``[5, widths, samples]``."""
    modules = len(work.first_degree) - 1
    totals = np.zeros((5, len(widths), num_samples))
    for level in range(len(widths)):
        for row in range(num_samples * modules):
            units = work.members[work.offsets[row] : work.offsets[row + 1]]
            if not len(units):
                continue
            sample = row // modules
            degree, span, place = _split(units, work, row % modules, widths[level], level == 0)
            load = np.zeros((5, len(units)))
            for index in range(len(units)):
                load[:, place[index]] += work.units[:, degree, units[index]]
            totals[0, level, sample] += span
            for column in range(1, 4):
                totals[column, level, sample] += load[column].max()
            totals[4, level, sample] = max(totals[4, level, sample], load[4].max())
    return totals


@njit()
def _exchanged(group_of, seconds, start, rounds):  # type: ignore[no-untyped-def]
    """Groups of samples after moves and swaps that lower the busiest group, and when that is done."""
    group_of = group_of.copy()
    load = start.copy()
    for sample in range(len(group_of) - 1, -1, -1):
        load[group_of[sample]] += seconds[sample]
    # Samples of each group, the last moved first.
    members = [np.flatnonzero(group_of == group) for group in range(len(load))]
    for _ in range(rounds):
        top = load.argmax()
        low = load.argmin()
        gain = 1e-9 * load[top]
        one = -1
        other = -1
        for sample in members[top]:
            less = load[top] - max(load[top] - seconds[sample], load[low] + seconds[sample])
            if less > gain * (1 + 1e-9):
                gain = less
                one = sample
        for turn in range(-1, len(load)):
            # The idlest group first: a swap gains half of the difference at most, which rules out most others.
            group = low if turn < 0 else turn
            room = load[top] - load[group]
            if room < 2 * gain * (1 - 1e-6):
                continue
            for sample in members[top]:
                for partner in members[group]:
                    less = seconds[sample] - seconds[partner]
                    if min(less, room - less) > gain * (1 + 1e-9):
                        gain = min(less, room - less)
                        one = sample
                        other = int(partner)
        if one < 0:
            break
        goal = low if other < 0 else group_of[other]
        for moved, source, target in ((one, top, goal), (other, goal, top)):
            if moved >= 0:
                members[source] = members[source][members[source] != moved]
                members[target] = np.append(np.array([moved]), members[target])
                group_of[moved] = target
                load[source] -= seconds[moved]
                load[target] += seconds[moved]
    return group_of, load.max()


# Which packs come first: factors of their width in the order.
WIDE, NARROW, SHARED = ORDERS = (-1, 1, 0)


def fastest_packs(
    shapes: SampleShapes, layout: Layout, profile: Profile, compare: bool = True
) -> tuple[float, Assignment]:
    """The deal, sizes and order of packs whose program ends first, and when; infinite if none fits."""
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

    All have equal shares of encoders and LLM. Of the least number of rounds, with all recomputed that can be, and of
    larger numbers that which ends first; infinite if none fits.
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
        cost[:, int(module is model.llm)] += np.bincount(owner, work.units[0, row, units], len(shapes))
        bytes_ += float(work.units[3, row, units].sum() * work.width[row])
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
    labels = labelled(work, order, offsets, deal.width, deal.first, key[0, start], np.concatenate(groups))
    modules = (slice(*work.first_unit[index : index + 2]) for index in range(len(groups)))
    return Assignment(tuple(ModuleAssignment(*(values[units] for values in labels)) for units in modules))


def place_packs(
    deal: Deal, seconds: FloatArray, bytes_: FloatArray, running: FloatArray, room: float, first: int
) -> IntArray:
    """Place of each sample's pack in the order in which ranks run them ``[samples]``.

    Of a group's packs the largest is last, to hide the reduction. ``first``: ``WIDE`` packs come first, or ``NARROW``
    ones, or the last packs of all widths share a place (``SHARED``).
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
