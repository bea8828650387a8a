"""Interleaved 1F1B: ranks hold several virtual stages each and run them in turn (arXiv:2104.04473, section 2.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.rounds import rounds_program
from entrain_bench.balancing.schedules import (
    backward_microbatch,
    chain_chunks,
    find_places,
    microbatches_per_replica,
    one_f_one_b,
)
from entrain_bench.balancing.warmup import OneForwardOneBackward
from entrain_bench.balancing.zero_bubble import Turns, ZeroBubbleH1, ZeroBubbleV, find_valley
from entrain_bench.base.arrays import IntArray
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program import Program, Slots, build_program
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes


def interleaved_slots(
    microbatch: IntArray, last: IntArray, num_microbatches: IntArray, num_ranks: int, stages_per_rank: int
) -> tuple[IntArray, IntArray]:
    """Slots of forwards and backwards at every virtual stage, in Megatron-LM's order ``[chunks, stages]``.

    A rank runs groups of as many microbatches as there are ranks, each group through all of the rank's stages before
    the next one, backwards from the last stage to the first. It warms up with (stages a rank - 1) groups and two
    forwards for every rank behind it.

    Args:
        microbatch: position in the replica's order ``[chunks]``.
        last: position in whose place the chunk runs backward ``[chunks]``.
        num_microbatches: microbatches of that replica, a multiple of the ranks ``[chunks]``.
        num_ranks: ranks (blocks) of the pipeline.
        stages_per_rank: virtual stages of each.
    """
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
    """Interleaved 1F1B over a chain of virtual stages: of the encoders, then the LLM's, then the generators'.

    Raises:
        IncompatibleError: if the stages do not go round the ranks (``find_turns``), and for microbatches that are
            no multiple of the pipeline's ranks, which Megatron-LM refuses, too.
    """
    chain = find_turns(model, layout)
    if chain is None:
        needed = "the interleaved schedule needs virtual stages that go round the ranks in order"
        raise IncompatibleError(f"schedule: {needed} (strategy.planner.virtual_order=loop)")
    chunks = chain_chunks(model, shapes, layout, assignment, split_backward=False)
    freed = backward_microbatch(model, shapes, assignment, chunks)
    places = microbatches_per_replica(layout, chunks, freed)
    uneven = np.flatnonzero(places[model.llm_index] % chain.num_ranks)
    if uneven.size:
        raise IncompatibleError(
            f"schedule: a replica has {places[model.llm_index][uneven[0]]} microbatches; with virtual stages the "
            f"number must be a multiple of {chain.num_ranks}, the pipeline's ranks"
        )
    slots = []
    for rows, last, per_replica, stage_places in zip(chunks, freed, places, chain.places, strict=True):
        count = per_replica[rows.replica]
        forward, backward = interleaved_slots(rows.microbatch, last, count, chain.num_ranks, chain.turns)
        slots.append(Slots(forward[:, stage_places], backward[:, stage_places]))
    return build_program(model, layout, shapes, chunks, slots)


def find_turns(model: ModelSpec, layout: Layout) -> Turns | None:
    """The interleaved pipeline that a layout is; None if it is none.

    Place i of the chain (``find_places``) is on rank i modulo their number.
    """
    chain = find_places(model, layout)
    if chain is None:
        return None
    of_place, places = chain
    count = len(of_place)
    num_ranks = len(np.unique(of_place))
    goes_round = num_ranks > 1 and count > num_ranks and count % num_ranks == 0
    if not goes_round or not np.array_equal(of_place, of_place[np.arange(count) % num_ranks]):
        return None
    return Turns(num_ranks, count // num_ranks, places)


@dataclass(frozen=True, slots=True)
class Interleaved(OneForwardOneBackward):
    """1F1B over the chain of all stages, as the layout asks for it.

    Interleaved where the chain goes round the ranks more than once; ZB-V where it goes down and back up; ZB-H1
    where the planner counted on a split backward. With groups of several widths, rounds are the microbatches of 1F1B.
    """

    handles_widths: ClassVar[bool] = True

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """Return the program.

        Raises:
            IncompatibleError: if the modules form no chain, or no interleaved one.
        """
        model = profile.job.model
        if layout.modules[0].widths:
            self._refuse_eager("groups of several widths")
            return self.within_memory(rounds_program(model, shapes, layout, assignment), profile)
        is_valley = find_valley(model, layout) is not None
        if is_valley or layout.split_backward:
            self._refuse_eager("a split backward")
            zero_bubble = ZeroBubbleV(memory=self.memory) if is_valley else ZeroBubbleH1(memory=self.memory)
            return zero_bubble.schedule(shapes, layout, assignment, profile)
        if max(placed.stages_per_rank for placed in layout.modules) > 1 or find_turns(model, layout) is not None:
            self._refuse_eager("virtual stages")
            return self.within_memory(interleaved_program(model, shapes, layout, assignment), profile)
        return self.in_chain(shapes, layout, assignment, profile)

    def _refuse_eager(self, what: str) -> None:
        if self.eager != "none":
            raise IncompatibleError(f"strategy.scheduler.eager={self.eager}: must be none with {what}")
