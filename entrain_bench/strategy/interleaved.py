"""Interleaved 1F1B: ranks hold several virtual stages each and run them in turn (arXiv:2104.04473, section 2.2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entrain_bench.arrays import IntArray
from entrain_bench.errors import IncompatibleError
from entrain_bench.program import Program, Slots, build_program
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.strategy.profile import Profile
from entrain_bench.strategy.schedules import (
    backward_microbatch,
    chain_chunks,
    microbatches_per_replica,
    one_f_one_b,
)
from entrain_bench.strategy.warmup import OneForwardOneBackward


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
    """Interleaved 1F1B of an LLM, with encoders on its first virtual stage and generators on its last.

    Raises:
        IncompatibleError: if another module than the LLM has several stages or is elsewhere, and for microbatches that
            are no multiple of the pipeline's ranks, which Megatron-LM refuses, too.
    """
    llm = layout.modules[model.llm_index]
    num_ranks = llm.pp // llm.stages_per_rank
    _check_places(model, layout, llm, num_ranks)
    chunks = chain_chunks(model, shapes, layout, assignment, split_backward=False)
    freed = backward_microbatch(model, shapes, assignment, chunks)
    places = microbatches_per_replica(layout, chunks, freed)
    uneven = np.flatnonzero(places[model.llm_index] % num_ranks)
    if uneven.size:
        raise IncompatibleError(
            f"schedule: {places[model.llm_index][uneven[0]]} microbatches of a replica: must be a multiple of the "
            f"{num_ranks} ranks of a pipeline of virtual stages"
        )
    slots = []
    for index, (rows, last, per_replica) in enumerate(zip(chunks, freed, places, strict=True)):
        count = per_replica[rows.replica]
        forward, backward = interleaved_slots(rows.microbatch, last, count, num_ranks, llm.stages_per_rank)
        if index != model.llm_index:
            own = [0] if index < model.llm_index else [llm.pp - 1]
            forward, backward = forward[:, own], backward[:, own]
        slots.append(Slots(forward, backward))
    return build_program(model, layout, shapes, chunks, slots)


def _check_places(model: ModelSpec, layout: Layout, llm: ModuleLayout, num_ranks: int) -> None:
    if llm.pp % llm.stages_per_rank or num_ranks < 2:
        raise IncompatibleError(f"schedule: {llm.pp} stages on {num_ranks} ranks are no interleaved pipeline")
    for index, placed in enumerate(layout.modules):
        end, where = (0, "first") if index < model.llm_index else (-1, "last")
        if placed is not llm and (placed.pp > 1 or not np.array_equal(placed.ranks[:, 0], llm.ranks[:, end])):
            raise IncompatibleError(
                f"schedule: beside virtual stages {placed.module} must be one stage on the ranks of {llm.module}'s "
                f"{where}"
            )


@dataclass(frozen=True, slots=True)
class Interleaved(OneForwardOneBackward):
    """1F1B over the chain of all stages, interleaved where the LLM has virtual stages."""

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """The program.

        Raises:
            IncompatibleError: if the modules form no chain, or no interleaved one.
        """
        model = profile.job.model
        if layout.modules[model.llm_index].stages_per_rank > 1:
            if self.eager != "none":
                raise IncompatibleError(f"strategy.scheduler.eager={self.eager}: must be none with virtual stages")
            return interleaved_program(model, shapes, layout, assignment)
        return OneForwardOneBackward.schedule(self, shapes, layout, assignment, profile)
