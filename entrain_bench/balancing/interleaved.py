"""Schedules of a chain of stages: interleaved 1F1B (arXiv:2104.04473, 2.2), ZB-H1 and ZB-V (arXiv:2401.10241)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np

from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.recomputation import Recomputation, recompute_all
from entrain_bench.balancing.rounds import rounds_program
from entrain_bench.balancing.schedules import (
    OneForwardOneBackward,
    chain_program,
    find_places,
    learns,
    one_f_one_b,
    slotted_program,
    stages_behind,
)
from entrain_bench.base.arrays import IntArray
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program import Program, Slots
from entrain_bench.program.assignment import Assignment, Chunks
from entrain_bench.program.layout import Layout
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes


@dataclass(frozen=True, slots=True)
class ZeroBubble(Recomputation):
    """Base of the two zero-bubble schedulers."""

    handles_generators: ClassVar[bool] = True

    def delayed(self, make: Callable[[int], Program], longest: int, profile: Profile) -> Program:
        """Return ``make`` of the longest delay of weight passes, in microbatches, that fits memory."""
        recomputes = self.chooses_recomputation and profile.job.request.recompute is None

        def fits(program: Program) -> bool:
            frugal = recompute_all(program) if recomputes else program
            return bool(profile.memory.peak_bytes(frugal).max() <= profile.job.planning_budget_bytes)

        make = cache(make)
        least = longest if fits(make(longest)) else 0
        while longest - least > 1:
            middle = (least + longest) // 2
            if fits(make(middle)):
                least = middle
            else:
                longest = middle
        return self.within_memory(make(least), profile)


@dataclass(frozen=True, slots=True)
class ZeroBubbleH1(ZeroBubble):
    """ZB-H1 (section 2.3): weight passes follow their backwards by as many microbatches as there are stages before."""

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """Return the program; ``IncompatibleError`` if the modules do not form a chain of one stage per rank."""
        model = profile.job.model
        behind = stages_behind(layout, model.llm_index)
        last = max(int(stages.max()) for stages in behind)

        def make(most: int) -> Program:
            delay = [np.minimum(last - stages, most) for stages in behind]
            return chain_program(model, shapes, layout, assignment, behind, weight_delay=delay)

        return self.delayed(make, last, profile)


@dataclass(frozen=True, slots=True)
class ZeroBubbleV(ZeroBubble):
    """ZB-V: two stages per rank, down the ranks and back up, without a bubble if F = B = W (section 6)."""

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """Return the program; ``IncompatibleError`` if the stages do not go down the ranks and back."""
        model = profile.job.model
        valley = find_turns(model, layout, valley=True)
        if valley is None:
            raise IncompatibleError(
                "schedule: ZB-V needs two stages per rank, down the ranks and back up. Set "
                "strategy.planner.virtual_stages=2 strategy.planner.virtual_order=v"
            )
        ranks = valley.num_ranks

        def make(most: int) -> Program:
            def slots(index: int, chunks: Chunks, last: IntArray, count: IntArray) -> Slots:
                forward, backward, weight = zb_v_slots(chunks.microbatch, last, count, ranks)
                if most < ranks - 1:
                    # In the slot of a later backward of the same stage, unless it comes before that anyway.
                    weight = np.minimum(weight, zb_v_slots(chunks.microbatch, last + most, count, ranks)[1])
                held = valley.places[index]
                split = learns(model.modules[index])
                return Slots(forward[:, held], backward[:, held], weight[:, held] if split else None)

            return slotted_program(model, shapes, layout, assignment, slots)

        return self.delayed(make, ranks - 1, profile)


@dataclass(frozen=True, slots=True)
class Turns:
    """A pipeline whose stages go round its ranks several times."""

    num_ranks: int  # ranks (blocks) of a replica
    turns: int  # virtual stages of each
    places: tuple[IntArray, ...]  # place of each module's stages in the chain of all ``[stages]``


def find_turns(model: ModelSpec, layout: Layout, valley: bool = False) -> Turns | None:
    """The pipeline over virtual stages, round the ranks or down and back (``valley``), of a layout; None if none."""
    # Where encoders of a valley end on the lowest rank the LLM may begin on its other place.
    for of_place, places in filter(None, (find_places(model, layout, apart) for apart in (False, True)[: 1 + valley])):
        count = len(of_place)
        num_ranks = len(np.unique(of_place))
        turns, rest = divmod(count, num_ranks)
        again = of_place[::-1] if valley else of_place[np.arange(count) % num_ranks]
        fits = turns == 2 if valley else turns > 1
        if num_ranks > 1 and fits and not rest and np.array_equal(of_place, again):
            return Turns(num_ranks, turns, places)
    return None


def zb_v_slots(
    microbatch: IntArray, last: IntArray, num_microbatches: IntArray, num_ranks: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Slots of forwards, backwards and weight passes at every place of the V ``[chunks, 2 ranks]``.

    The order of arXiv:2401.10241, section 6, for F = B = W: of p ranks rank i, with stages 0 and 1 down and up, runs

    1. 2(p - i) - 1 times F0, then i times F1 F0, then p - i times F1 B1 W1;
    2. F0 B0 W0 F1 B1 W1 in turn, without F0 where there is none left, until there is no F1;
    3. i times B0 B1, then p - i times B0 W0, then all W1 that are left, then all W0.
    """
    p = num_ranks
    i = np.arange(p)
    n = np.maximum(num_microbatches, 2 * p - 1)[:, None]
    f = microbatch[:, None]
    b = last[:, None]
    # First slots of the phases: F1 F0, F1 B1 W1, the steady state, B0 B1, B0 W0, W1 and W0.
    mixed = 2 * (p - i) - 1
    down = mixed + 2 * i
    steady = down + 3 * (p - i)
    up = steady + 6 * (n - p)
    drain = up + 2 * i
    rest_1 = drain + 2 * (p - i)
    rest_0 = rest_1 + i
    ahead = 2 * p - 1 - i  # F0 before the steady state
    forward_0 = np.select([f < mixed, f < ahead], [f, 2 * f - mixed + 1], steady + 6 * (f - ahead))
    forward_1 = np.select([f < i, f < p], [mixed + 2 * f, down + 3 * (f - i)], steady + 6 * (f - p) + 3)
    backward_0 = np.select(
        [b < n - p, b < n - p + i], [steady + 6 * b + 1, up + 2 * (b - n + p)], drain + 2 * (b - n + p - i)
    )
    backward_1 = np.select(
        [b < p - i, b < n - i], [down + 3 * b + 1, steady + 6 * (b - p + i) + 4], up + 2 * (b - n + i) + 1
    )
    weight_0 = np.select([b < n - p, b < n - i], [steady + 6 * b + 2, drain + 2 * (b - n + p) + 1], rest_0 + b - n + i)
    weight_1 = np.select([b < p - i, b < n - i], [down + 3 * b + 2, steady + 6 * (b - p + i) + 5], rest_1 + b - n + i)
    forward = np.concatenate([forward_0, forward_1[:, ::-1]], axis=1)
    backward = np.concatenate([backward_0, backward_1[:, ::-1]], axis=1)
    return forward, backward, np.concatenate([weight_0, weight_1[:, ::-1]], axis=1)


def interleaved_slots(
    microbatch: IntArray, last: IntArray, num_microbatches: IntArray, num_ranks: int, stages_per_rank: int
) -> tuple[IntArray, IntArray]:
    """Slots of forwards and backwards at every virtual stage, in Megatron-LM's order ``[chunks, stages]``.

    A rank runs groups of as many microbatches as there are ranks, each through all of its stages, backwards from the
    last to the first. It warms up with (stages per rank - 1) groups and two forwards for every rank behind it.
    ``IncompatibleError`` if a replica's microbatches do not fill groups.
    """
    uneven = num_microbatches[num_microbatches % num_ranks > 0]
    if uneven.size:
        raise IncompatibleError(
            f"schedule: a replica has {uneven[0]} microbatches; with virtual stages the number must be a multiple of "
            f"{num_ranks}, the pipeline's ranks"
        )
    turn, rank = np.divmod(np.arange(num_ranks * stages_per_rank), num_ranks)
    warmup = 2 * (num_ranks - 1 - rank) + (stages_per_rank - 1) * num_ranks
    total = stages_per_rank * num_microbatches[:, None]

    def place(number: IntArray, turns: IntArray) -> IntArray:
        group, inside = np.divmod(number[:, None], num_ranks)
        return np.asarray((group * stages_per_rank + turns) * num_ranks + inside)

    forward, _ = one_f_one_b(place(microbatch, turn), total, warmup)
    _, backward = one_f_one_b(place(last, stages_per_rank - 1 - turn), total, warmup)
    return forward, backward


def interleaved_program(model: ModelSpec, shapes: SampleShapes, layout: Layout, assignment: Assignment) -> Program:
    """Interleaved 1F1B over a chain of virtual stages; ``IncompatibleError`` if they do not go round the ranks."""
    chain = find_turns(model, layout)
    if chain is None:
        raise IncompatibleError(
            "schedule: the interleaved schedule needs virtual stages that go round the ranks in order "
            "(strategy.planner.virtual_order=loop)"
        )

    def slots(index: int, chunks: Chunks, last: IntArray, count: IntArray) -> Slots:
        forward, backward = interleaved_slots(chunks.microbatch, last, count, chain.num_ranks, chain.turns)
        return Slots(forward[:, chain.places[index]], backward[:, chain.places[index]])

    return slotted_program(model, shapes, layout, assignment, slots)


def interleaved_phases(model: ModelSpec, shapes: SampleShapes, layout: Layout, assignment: Assignment) -> Program:
    """All encoder forwards, the LLM's interleaved 1F1B, all encoder backwards; encoders have one stage."""
    turns = layout.modules[-1].stages_per_rank
    num_ranks = layout.modules[-1].pp // turns
    most = 1 + max(int(labels.microbatch.max(initial=0)) for labels in assignment.modules)

    def slots(index: int, chunks: Chunks, last: IntArray, count: IntArray) -> Slots:
        if index < model.llm_index:
            place = chunks.microbatch[:, None]
            return Slots(place, most * (1 + 2 * turns) + place)
        forward, backward = interleaved_slots(chunks.microbatch, last, count, num_ranks, turns)
        return Slots(most + forward, most + backward)

    return slotted_program(model, shapes, layout, assignment, slots)


@dataclass(frozen=True, slots=True)
class Interleaved(OneForwardOneBackward):
    """1F1B over the chain of all stages, as the layout asks for it.

    Interleaved where the chain goes round the ranks more than once; ZB-V where it goes down and back up; ZB-H1
    where the planner counted on a split backward. With groups of several widths, rounds are the microbatches of 1F1B.
    """

    handles_widths: ClassVar[bool] = True

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """Return the program; ``IncompatibleError`` if the modules form no chain, or no interleaved one."""
        model = profile.job.model
        if layout.modules[0].widths:
            self._refuse_eager("groups of several widths")
            return self.within_memory(rounds_program(model, shapes, layout, assignment), profile)
        is_valley = find_turns(model, layout, valley=True) is not None
        if is_valley or layout.split_backward:
            self._refuse_eager("a split backward")
            zero_bubble = ZeroBubbleV if is_valley else ZeroBubbleH1
            return zero_bubble(memory=self.memory).schedule(shapes, layout, assignment, profile)
        if max(placed.stages_per_rank for placed in layout.modules) > 1 or find_turns(model, layout) is not None:
            self._refuse_eager("virtual stages")
            return self.within_memory(interleaved_program(model, shapes, layout, assignment), profile)
        return self.in_chain(shapes, layout, assignment, profile)

    def _refuse_eager(self, what: str) -> None:
        if self.eager != "none":
            raise IncompatibleError(f"strategy.scheduler.eager={self.eager}: must be none with {what}")
