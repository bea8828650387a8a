"""Two simple baselines: whole samples dealt out by their estimated total time, longest first (LPT).

``lpt`` deals them to replicas, ``lpt_widths`` to context-parallel groups as wide as each sample needs. The time
of a sample is that of its items and its LLM sequence, forward and backward. LPT covers the whole iteration.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np

from entrain_bench.balancing.interleaved import find_turns
from entrain_bench.balancing.lpt import aligned_first, deal, longest_first, lpt_with_exchange
from entrain_bench.balancing.planning import recompute_factor
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.rank_groups import room_bytes, sample_costs, unit_costs
from entrain_bench.balancing.rounds import group_widths
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import FloatArray, IntArray, offsets_from_counts
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.base.hosttime import each_replica_alone
from entrain_bench.program.assignment import Assignment, ModuleAssignment, same_microbatches
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.specs.shapes import SampleShapes

# Microbatches may need this multiple of the memory for activations; recomputation compensates.
CROWDED = 2.0
HIDING = 16  # microbatches beyond which the last one hides hardly any of the step
AGAIN = recompute_factor(recompute=True) - 1.0  # time of recomputing everything, relative to both passes
# Limits of a sample's time on its group that are compared, as shares of the evenly divided work.
LIMITS = (1.0, 0.85, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.12)


def may_recompute(layout: Layout, profile: Profile) -> bool:
    """Whether recomputation is left to the scheduler."""
    return profile.job.request.recompute is None and not any(placed.recompute for placed in layout.modules)


@dataclass(frozen=True, slots=True)
class Line:
    """The pipeline of a replica, of 1F1B or interleaved; one stage is a pipeline of one rank."""

    depth: int  # ranks (blocks) that follow each other
    turns: int  # virtual stages of each

    @classmethod
    def of(cls, layout: Layout, model: ModelSpec) -> Line:
        """The pipeline of a layout."""
        llm = layout.modules[model.llm_index]
        turns = find_turns(model, layout) if not layout.is_one_stage else None
        return cls(layout.num_ranks // (llm.dp * llm.tp * llm.cp), turns.turns if turns else 1)

    def held(self, count: IntArray) -> FloatArray:
        """Return the most microbatches of a stage whose activations a rank holds, out of ``count``."""
        if self.turns == 1:
            return np.minimum(count, self.depth) / count
        ahead = 2 * (self.depth - 1) + (self.turns - 1) * self.depth + 1
        return np.minimum(count * self.turns, ahead) / count


class Load(NamedTuple):
    """The work of each group, all stages together ``[groups]``."""

    seconds: FloatArray
    bytes_: FloatArray  # of the fullest stage
    samples: FloatArray | IntArray
    longest_s: FloatArray  # of its longest sample

    @classmethod
    def of(cls, group: IntArray, seconds: FloatArray, bytes_: FloatArray, count: int) -> Load:
        """Return the load of each group."""
        longest_s = np.zeros(count)
        np.maximum.at(longest_s, group, seconds)
        load_s, load_bytes = (np.bincount(group, values, count) for values in (seconds, bytes_))
        return cls(load_s, load_bytes, np.bincount(group, minlength=count), longest_s)


def count_microbatches(load: Load, microbatch_s: float, layout: Layout, profile: Profile) -> IntArray:
    """Number of microbatches of each group that takes least by estimate ``[groups]``.

    A microbatch has a fixed time; few of them recompute more, hide less of the step, and need longer fill and drain.
    """
    line = Line.of(layout, profile.job.model)
    room = max(room_bytes(layout, profile), 1.0)
    most = np.maximum(load.samples, 1)[:, None]
    if line.depth == 1:
        most = np.minimum(most, np.maximum(np.ceil(decisive(load.bytes_[:, None] / room)), 1.0))
    step = line.depth if line.turns > 1 else 1
    count = np.arange(step, int(most.max()) + step, step)
    held = line.held(count) * load.bytes_[:, None]
    again = np.maximum(1.0 - room / np.maximum(held, 1.0), 0.0)
    fill_s = np.maximum(load.seconds[:, None] / count, load.longest_s[:, None]) + microbatch_s
    rank_s = load.seconds[:, None] * (1.0 + AGAIN * again) + count * microbatch_s
    total_s = (rank_s + (line.depth - 1) / line.turns * fill_s) / line.depth
    if line.depth == 1:
        few = count[:HIDING].tolist()
        step_s = np.array([profile.programs.step_s(replace(layout, num_microbatches=number)) for number in few])
        total_s = total_s + step_s[np.minimum(count, HIDING) - 1]
    crowded = held > room * (CROWDED if may_recompute(layout, profile) else 1.0)
    allowed = (count < most + step) & ~(crowded & (count < most))
    return np.asarray(count[np.where(allowed, decisive(total_s), np.inf).argmin(axis=1)])


def divide(seconds: FloatArray, bytes_: FloatArray, count: int, line: Line) -> IntArray:
    """Return the microbatch of each sample, at most ``count`` with about equal seconds and bytes.

    The longest is the last; in a pipeline, which fills and drains, it is in the middle.
    """
    places = min(count, len(seconds))
    if places <= 1:
        rank: IntArray = np.zeros(len(seconds), np.int64)
    else:
        shares = np.stack([seconds / max(seconds.sum(), 1e-12), bytes_ / max(bytes_.sum(), 1.0)], axis=1)
        microbatch = lpt_with_exchange(decisive(shares), places)
        order = np.argsort(decisive(np.bincount(microbatch, seconds, places)), kind="stable")
        if line.depth > 1:
            order = np.concatenate([order[::2], order[1::2][::-1]])
        rank = np.argsort(order, kind="stable")[microbatch]
    if line.turns > 1:
        # The last takes the last place of a whole group of as many microbatches as ranks.
        rank = np.where(rank == places - 1, count - 1, rank)
    return np.asarray(rank)


@dataclass(frozen=True, slots=True)
class LongestFirst:
    """Samples to replicas of fixed degrees, by LPT and exchanges."""

    handles_generators: ClassVar[bool] = True
    chooses_microbatches: ClassVar[bool] = True

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Return replicas by estimated seconds; a replica's microbatches have about equal seconds and bytes."""
        model = profile.job.model
        dp = layout.modules[model.llm_index].dp
        (seconds,), bytes_, (microbatch_s,) = sample_costs(shapes, layout, profile, spread=False)
        replica = lpt_with_exchange(decisive(np.stack([seconds, seconds], axis=1)), dp)
        line = Line.of(layout, model)
        counts = count_microbatches(Load.of(replica, seconds, bytes_, dp), float(microbatch_s), layout, profile)
        microbatch = np.zeros(len(shapes), np.int64)
        with each_replica_alone(dp):
            for one, count in enumerate(counts.tolist()):
                mine = np.flatnonzero(replica == one)
                microbatch[mine] = divide(seconds[mine], bytes_[mine], count, line)
        return same_microbatches(model, shapes, replica, microbatch, microbatch)


class UnitWork(NamedTuple):
    """Units of a module on groups of every degree. Units of a pack may share its ranks in narrower groups."""

    module: ModuleSpec
    placed: ModuleLayout
    shapes: SampleShapes
    seconds: FloatArray  # of a unit ``[degrees, units]``
    bytes_: FloatArray  # of a unit on the narrowest group ``[units]``
    pack_s: FloatArray  # fixed seconds of a pack ``[degrees]``

    @property
    def owner(self) -> IntArray:
        """Sample of each unit ``[units]``."""
        return self.module.owners(self.shapes, self.module.units(self.shapes))

    @property
    def ranks(self) -> IntArray:
        """Ranks of a group ``[degrees]``."""
        return np.array([tp * cp for tp, cp in self.placed.degrees])

    def on_widths(self, widths: IntArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return seconds of samples in packs of some widths, in ranks ``[widths, samples]``.

        Further: their bytes on the narrowest width ``[samples]``, and the fixed seconds of a pack ``[widths]``.
        """
        count = len(self.shapes)
        owner = self.owner
        sums = np.stack([np.bincount(owner, unit_s, count) for unit_s in self.seconds])
        longest = np.zeros_like(sums)
        for row, unit_s in zip(longest, self.seconds, strict=True):
            np.maximum.at(row, owner, unit_s)
        seconds = np.zeros((len(widths), count))
        pack_s = np.zeros(len(widths))
        for level, width in enumerate(widths.tolist()):
            groups = np.maximum(width // self.ranks, 1)[:, None]
            # The narrowest packs hold many samples, whose units fill all groups.
            alone = longest if level else 0.0
            options = np.where(self.ranks[:, None] <= width, np.maximum(sums / groups, alone), np.inf)
            best = int(decisive(options.sum(axis=1) + self.pack_s).argmin())
            seconds[level] = options.min(axis=0)
            pack_s[level] = self.pack_s[best]
        return seconds, np.bincount(owner, self.bytes_, count) * self.placed.tp / widths[0], pack_s

    def labels(self, pack: IntArray, number: IntArray, first: IntArray, width: IntArray) -> ModuleAssignment:
        """Return each unit's group, of the degree with which its pack's units end first; its round is its sample's.

        Of samples: their packs, rounds, and the packs' first ranks and widths ``[samples]``.
        """
        owner = self.owner
        pack = pack[owner]
        first = first[owner]
        width = width[owner]
        num_packs = 1 + int(pack.max(initial=-1))
        ends_s = np.full(num_packs, np.inf)
        replica = np.zeros(len(owner), np.int64)
        starts = offsets_from_counts(self.placed.num_groups)
        for degree, (ranks, unit_s) in enumerate(zip(self.ranks.tolist(), decisive(self.seconds), strict=True)):
            groups = np.zeros(num_packs, np.int64)
            groups[pack] = width // ranks
            place = deal(np.argsort(-unit_s, kind="stable"), pack, unit_s, np.maximum(groups, 1))
            load_s = np.zeros((num_packs, int(groups.max(initial=1)) or 1))
            np.add.at(load_s, (pack, place), unit_s)
            spans_s = np.where(groups > 0, decisive(load_s.max(axis=1) + self.pack_s[degree]), np.inf)
            faster = (spans_s < ends_s)[pack]
            ends_s = np.minimum(ends_s, spans_s)
            replica = np.where(faster, starts[degree] + first // ranks + place, replica)
        return ModuleAssignment(replica, number[owner])


@dataclass(frozen=True, slots=True)
class LongestFirstOnWidths:
    """Samples to the narrowest groups that end in time: wide ones first, longest first, by LPT and exchanges."""

    handles_generators: ClassVar[bool] = True
    chooses_microbatches: ClassVar[bool] = True
    handles_widths: ClassVar[bool] = True

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Group and round of every sample; ``IncompatibleError`` for a layout without groups of several widths."""
        model = profile.job.model
        if not all(placed.widths for placed in layout.modules):
            raise IncompatibleError("layout: lpt_widths needs groups of several widths (strategy/planner=hybrid_cp)")
        work = [
            UnitWork(module, placed, shapes, *unit_costs(module, placed, shapes, profile))
            for module, placed in zip(model.modules, layout.modules, strict=True)
        ]
        # Widths in positions, each of the LLM's narrowest group.
        ranks_of_position = int(group_widths(layout)[0])
        widths = group_widths(layout) // ranks_of_position
        priced = [one.on_widths(widths * ranks_of_position) for one in work]
        seconds, bytes_, microbatch_s = (np.sum(values, axis=0) for values in zip(*priced, strict=True))
        room = max(room_bytes(layout, profile), 1.0)
        again = np.maximum(1.0 - room * widths[:, None] / np.maximum(bytes_, 1.0), 0.0)
        seconds = decisive(seconds * (1.0 + AGAIN * again) + (microbatch_s * (widths > 1))[:, None])
        # On the widest group a sample runs in any case.
        seconds[:-1][again[:-1] > (1.0 - 1.0 / CROWDED) * may_recompute(layout, profile)] = np.inf
        num_positions = layout.num_ranks // (Line.of(layout, model).depth * ranks_of_position)
        level, first = dealt(seconds, widths, num_positions)
        width = widths[level]
        own_s = seconds[level, np.arange(len(shapes))]
        _, lead, group = np.unique(np.stack([width, first]), axis=1, return_index=True, return_inverse=True)
        group = group.ravel()
        load = Load.of(group, own_s, bytes_ / width, len(lead))
        ranks = [slice(first[sample], first[sample] + width[sample]) for sample in lead]
        line = Line.of(layout, model)
        if line.depth > 1:
            # The groups of a position share its pipeline.
            whole = Load(
                shared(load.seconds, ranks, num_positions),
                shared(load.bytes_, ranks, num_positions),
                shared(load.samples, ranks, num_positions),
                shared(load.longest_s, ranks, num_positions, as_most=True),
            )
            share = load.seconds / np.maximum(whole.seconds, 1e-12)
            counts = np.rint(decisive(count_microbatches(whole, float(microbatch_s[0]), layout, profile) * share))
            counts = np.maximum(counts, 1.0).astype(np.int64)
        else:
            counts = count_microbatches(load, float(microbatch_s[0]), layout, profile)
        # Ranks meet in every backward that scatters gradients, and see those of one round in different orders.
        may_share = line.depth == 1 and not any(placed.scatters for placed in layout.modules)
        number = numbered(group, ranks, own_s, bytes_ / width, counts, line, room, may_share=may_share)
        _, pack = np.unique(np.stack([number, first, width]), axis=1, return_inverse=True)
        pack = pack.ravel()
        first *= ranks_of_position
        width *= ranks_of_position
        return Assignment(tuple(one.labels(pack, number, first, width) for one in work))


def shared(
    values: FloatArray | IntArray, ranks: list[slice], num_positions: int, *, as_most: bool = False
) -> FloatArray:
    """Return sum or maximum of values over a position's groups, at each group's busiest position ``[groups]``."""
    total = np.zeros(num_positions)
    for held, value in zip(ranks, values.tolist(), strict=True):
        total[held] = np.maximum(total[held], value) if as_most else total[held] + value
    return np.array([total[held].max() for held in ranks])


def dealt(seconds: FloatArray, widths: IntArray, num_positions: int) -> tuple[IntArray, IntArray]:
    """Return width and first position of each sample's group, for the limit with the earliest end ``[samples]``.

    ``seconds`` are of a sample on each width ``[widths, samples]``, infinite where it does not fit.
    """
    even_s = float((seconds * widths[:, None]).min(axis=0).sum()) / num_positions
    best_s = np.inf
    for limit in LIMITS:
        good = seconds <= decisive(limit * even_s)
        chosen = np.where(good.any(axis=0), good.argmax(axis=0), seconds.argmin(axis=0))
        own_s = seconds[chosen, np.arange(len(chosen))]
        order = np.lexsort((-own_s, -chosen))
        begin, load_s = aligned_first(order[chosen[order] > 0], widths[chosen], own_s, num_positions)
        narrow = np.flatnonzero(chosen == 0)
        costs = [np.stack([values, values], axis=1) for values in (own_s[narrow], load_s)]
        begin[narrow] = longest_first(costs[0], num_positions, costs[1])
        np.add.at(load_s, begin[narrow], own_s[narrow])
        if decisive(load_s.max()) < best_s:
            best_s = decisive(load_s.max())
            best = chosen, begin, narrow, costs
    level, first, narrow, costs = best
    first[narrow] = lpt_with_exchange(costs[0], num_positions, costs[1])
    return level, first


def numbered(
    group: IntArray,
    ranks: list[slice],
    seconds: FloatArray,
    bytes_: FloatArray,
    counts: IntArray,
    line: Line,
    room: float,
    *,
    may_share: bool,
) -> IntArray:
    """Round of each sample; groups, whose ``ranks`` nest, are listed narrow to wide, ``bytes_`` are of a rank.

    Backwards of the last round hide the reduction of gradients. Of three orders the one is taken whose last rank begins
    its last round first, recomputation included: narrow groups first, wide groups first, or one common last round.
    """
    members = [np.flatnonzero(group == index) for index in range(len(ranks))]
    places = [divide(seconds[m], bytes_[m], count, line) for m, count in zip(members, counts.tolist(), strict=True)]
    lasts = [m[place == place.max()] for m, place in zip(members, places, strict=True)]
    num_positions = max(held.stop for held in ranks)
    last_s, last_bytes = ([float(values[m].sum()) for m in lasts] for values in (seconds, bytes_))
    before_s = np.bincount(group, seconds) - last_s

    def last_begin_s(order: tuple[range, bool]) -> float:
        groups, is_shared = order
        begin_s, end_s, held_bytes, held_s = np.zeros((4, num_positions))
        for index in groups:
            mine = ranks[index]
            begin_s[mine] = end_s[mine].max() + before_s[index]
            end_s[mine] = begin_s[mine] + (0.0 if is_shared else last_s[index])
            held_bytes[mine] = last_bytes[index] + is_shared * held_bytes[mine]
            held_s[mine] = last_s[index] + is_shared * held_s[mine]
        again = np.maximum(1.0 - room / np.maximum(held_bytes, 1.0), 0.0)
        return float(decisive((begin_s + AGAIN * again * held_s).max()))

    falling = range(len(ranks))[::-1]
    together = [(falling, True)] * may_share
    groups, is_shared = min([(falling[::-1], False), (falling, False), *together], key=last_begin_s)
    number = np.zeros(len(group), np.int64)
    taken = np.zeros(num_positions, np.int64)
    for index in groups:
        number[members[index]] = taken[ranks[index]].max() + places[index]
        taken[ranks[index]] = int(number[members[index]].max()) + (not is_shared)
    if is_shared:
        number[np.concatenate(lasts)] = taken.max()
    return number
