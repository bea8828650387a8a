"""LPT on groups of several widths, a simple baseline: samples on context-parallel groups as wide as each needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from entrain_bench.balancing.lpt import aligned_first, longest_first, lpt_with_exchange
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.rank_groups import room_bytes
from entrain_bench.balancing.rounds import group_widths
from entrain_bench.balancing.unit_work import UnitWork
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.parse import OneOf
from entrain_bench.specs.shapes import SampleShapes

from .lpt import AGAIN, CROWDED, Line, Load, count_microbatches, divide, may_recompute

# Limits of a sample's time on its group that are compared, as shares of the evenly divided work.
LIMITS = (1.0, 0.85, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.12)
LastRound = Annotated[str, OneOf(("own", "shared"))]


@dataclass(frozen=True, slots=True)
class LongestFirstOnWidths:
    """Samples to the narrowest groups that end in time: wide ones first, longest first, by LPT and exchanges.

    Attributes:
        last_round: ``shared`` gives all groups their last microbatch in one round, ``own`` one after the other.
    """

    handles_generators: ClassVar[bool] = True
    chooses_microbatches: ClassVar[bool] = True
    handles_widths: ClassVar[bool] = True
    last_round: LastRound = "own"

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Group and round of every sample; ``IncompatibleError`` for a layout without groups of several widths."""
        model = profile.job.model
        if not all(placed.widths for placed in layout.modules):
            raise IncompatibleError("layout: lpt_widths needs groups of several widths (strategy/planner=hybrid_cp)")
        work = [
            UnitWork.of(module, placed, shapes, profile)
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
        members = [np.flatnonzero(group == index) for index in range(len(ranks))]
        places = [divide(own_s[m], (bytes_ / width)[m], n, line) for m, n in zip(members, counts.tolist(), strict=True)]
        # Ranks meet in every backward that scatters gradients, and see those of one round in different orders.
        may_share = line.depth == 1 and not any(placed.scatters for placed in layout.modules)
        number = numbered(group, ranks, places, shares_last=self.last_round == "shared" and may_share)
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


def numbered(group: IntArray, ranks: list[slice], places: list[IntArray], *, shares_last: bool) -> IntArray:
    """Return the round of each sample; groups, whose ``ranks`` nest, are listed narrow to wide.

    ``places`` are the microbatches of each group's samples. Ranks take their narrow groups first, whose last rounds are
    one with those of wider ones if it ``shares_last``. Backwards of the last round hide the reduction of gradients.
    """
    members = [np.flatnonzero(group == index) for index in range(len(ranks))]
    number = np.zeros(len(group), np.int64)
    taken = np.zeros(max(held.stop for held in ranks), np.int64)
    for mine, held, place in zip(members, ranks, places, strict=True):
        number[mine] = taken[held].max() + place
        taken[held] = int(number[mine].max()) + (not shares_last)
    if shares_last:
        last = [mine[place == place.max()] for mine, place in zip(members, places, strict=True)]
        number[np.concatenate(last)] = taken.max()
    return number
