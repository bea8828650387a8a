"""The order of actions on every rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from entrain_bench.errors import require
from entrain_bench.program import Program, Slots, build_program, reorder
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.strategy.profile import Profile
from entrain_bench.strategy.schedules import chain_chunks

from .replicas import replicas_of
from .search import Rules, search

# Rollouts for a program that a planner only compares or checks.
DRAFT_ROLLOUTS = 8


@dataclass(frozen=True, slots=True)
class BraidScheduler:
    """List schedules, and a search over the order of microbatches on the slowest replica.

    Attributes:
        rollouts: schedules tried beyond the first of every replica, of all replicas together.
        llm_leads: numbers of microbatches by which the LLM's actions go before encoders', each tried; (0,): none.
        alternate: whether forwards and backwards that could both run take turns; otherwise backwards go first.
        fill_gaps: whether a rank fills the time until its partners in a wider action are free.
    """

    rollouts: int = 128
    llm_leads: tuple[int, ...] = (4, 8, 16, 32)
    alternate: bool = True
    fill_gaps: bool = True

    def __post_init__(self) -> None:
        require(self.rollouts >= 0, "strategy.scheduler.rollouts", self.rollouts, "at least 0")
        leads = [*self.llm_leads]
        require(bool(leads) and min(leads) >= 0, "strategy.scheduler.llm_leads", leads, "numbers of 0 or more")

    def draft(self) -> BraidScheduler:
        """A shorter search."""
        return replace(self, rollouts=min(self.rollouts, DRAFT_ROLLOUTS))

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """The program."""
        model = profile.job.model
        chunks = chain_chunks(model, shapes, layout, assignment, split_backward=False)
        empty = [np.zeros((len(rows), own.pp), np.int64) for rows, own in zip(chunks, layout.modules, strict=True)]
        # Actions and dependencies do not depend on slots.
        draft = build_program(model, layout, shapes, chunks, [Slots(each, each) for each in empty])
        slot = np.zeros(int(draft.first_action[-1]), np.int64)
        rules = Rules(tuple(self.llm_leads), self.alternate, self.fill_gaps)
        for found in search(replicas_of(draft, assignment, profile), rules, self.rollouts):
            slot[found.replica.own] = found.place
        slots = [
            Slots(slot[draft.forward_actions(index)], slot[draft.backward_actions(index)])
            for index in range(len(chunks))
        ]
        return reorder(draft, slots)
