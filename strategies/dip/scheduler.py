"""DIP's schedule: segments of all modules interleaved on every rank, by believed durations (arXiv:2504.14145)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from entrain_bench.errors import IncompatibleError, require, unknown_choice
from entrain_bench.program import Program, Slots, build_program, reorder
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.strategy.profile import Profile
from entrain_bench.strategy.schedules import chain_chunks, three_phase_program

from .rollouts import best_slots
from .segments import segments_of

ORDERS = ("interleave", "phases")
# Every rollout is a node in the tree of every set of lanes, some 60 bytes each.
MAX_ROUNDS = 2**20


@dataclass(frozen=True, slots=True)
class DipScheduler:
    """Orders the actions of every rank.

    Attributes:
        order: ``interleave``, DIP's greedy dual-queue order, or ``phases``, the plain order that arXiv:2605.27918
            compares with: all encoder forwards, the LLM's 1F1B, all encoder backwards.
        search_rounds: rollouts of the tree search over the order of microbatches, each of all replicas; 0 keeps the
            order of arrival.
        search_seconds: wall time after which no rollout starts; the order then depends on the machine.
    """

    order: str = "interleave"
    search_rounds: int = 16
    search_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise unknown_choice("strategy.scheduler.order", self.order, ORDERS)
        few = 0 <= self.search_rounds <= MAX_ROUNDS
        require(few, "strategy.scheduler.search_rounds", self.search_rounds, f"at least 0, at most {MAX_ROUNDS}")
        limited = self.search_seconds is None or self.search_seconds >= 0
        require(limited, "strategy.scheduler.search_seconds", self.search_seconds, "null or at least 0")

    def draft(self) -> DipScheduler:
        """The greedy order, with which the search begins."""
        return replace(self, search_rounds=0)

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """The program.

        Raises:
            IncompatibleError: for an interleaved order if a stage spans several lanes (modules that share some ranks
                with different TP or CP), for the interleaver gives each action one lane; for phases if stages are
                virtual.
        """
        model = profile.job.model
        if self.order == "phases":
            return three_phase_program(model, shapes, layout, assignment)
        if any(np.any(np.diff(blocks.offsets) != 1) for blocks in layout.blocks):
            raise IncompatibleError(
                "strategy.scheduler: DIP's interleaver needs one TP x CP for modules on the same ranks"
            )
        chunks = chain_chunks(model, shapes, layout, assignment, split_backward=False)
        empty = [
            np.zeros((len(rows), placed.pp), np.int64) for rows, placed in zip(chunks, layout.modules, strict=True)
        ]
        # Actions and dependencies do not depend on slots.
        draft = build_program(model, layout, shapes, chunks, [Slots(each, each) for each in empty])
        slot = best_slots(segments_of(draft, assignment, profile), self.search_rounds, self.search_seconds)
        slots = [
            Slots(slot[draft.forward_actions(index)], slot[draft.backward_actions(index)])
            for index in range(len(chunks))
        ]
        return reorder(draft, slots)
