"""The order of actions on every rank."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from entrain_bench.arithmetic import decisive
from entrain_bench.errors import IncompatibleError, require
from entrain_bench.program import Program, Slots, build_program, reorder
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.strategy.beliefs import packed_iteration_s
from entrain_bench.strategy.profile import Profile
from entrain_bench.strategy.recomputation import Recomputation, recompute_all
from entrain_bench.strategy.schedules import chain_chunks

from .replicas import replicas_of
from .search import Rules, Search, improve

# Rollouts for a program that a planner only compares or checks.
DRAFT_ROLLOUTS = 24
# Share of the memory that plans may use up to which an order does not count as held up by it.
AMPLE = 0.85


@dataclass(frozen=True, slots=True)
class BraidScheduler(Recomputation):
    """List schedules, and a search over the order of microbatches on the slowest replica.

    Attributes:
        rollouts: schedules tried beyond the first of every replica, of all replicas together.
        llm_leads: numbers of microbatches by which the LLM's actions go before encoders', each tried; (0,): none.
        holds: encoder backwards that take so many times as long as the LLM's mean one wait until their ranks have done
            all of the LLM, each tried; 0: none wait.
        alternate: whether forwards and backwards that could both run take turns; otherwise backwards go first.
    """

    rollouts: int = 256
    llm_leads: tuple[int, ...] = (1000, 8)
    holds: tuple[float, ...] = (0.0, 50.0, 20.0)
    alternate: bool = True
    memory: str = field(default="greedy", kw_only=True)

    def __post_init__(self) -> None:
        Recomputation.__post_init__(self)
        require(self.rollouts >= 0, "strategy.scheduler.rollouts", self.rollouts, "at least 0")
        leads = [*self.llm_leads]
        holds = [*self.holds]
        require(bool(holds) and min(holds) >= 0, "strategy.scheduler.holds", holds, "numbers of 0 or more")
        require(bool(leads) and min(leads) >= 0, "strategy.scheduler.llm_leads", leads, "numbers of 0 or more")

    def draft(self) -> BraidScheduler:
        """A shorter search."""
        memory = "greedy" if self.memory == "exact" else self.memory
        return replace(self, rollouts=min(self.rollouts, DRAFT_ROLLOUTS), memory=memory)

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """The program.

        Raises:
            IncompatibleError: if weights are sharded, for replicas would have to run their passes in one order.
        """
        model = profile.job.model
        for own in layout.modules:
            if own.sharded:
                raise IncompatibleError(
                    f"schedule: weights of {own.module} are sharded; Braid orders replicas one by one"
                )
        chunks = chain_chunks(model, shapes, layout, assignment, split_backward=False)
        empty = [np.zeros((len(rows), own.pp), np.int64) for rows, own in zip(chunks, layout.modules, strict=True)]
        # Actions and dependencies do not depend on slots.
        draft = build_program(model, layout, shapes, chunks, [Slots(each, each) for each in empty])
        limit = profile.job.planning_budget_bytes
        searches = self._search(draft, assignment, profile)
        first = ordered(draft, searches)
        is_ample = float(profile.memory.peak_bytes(first).max()) <= AMPLE * limit
        improve(searches, self.rollouts)
        plain = ordered(draft, searches)
        if is_ample or not self.chooses_recomputation or profile.job.request.recompute is not None:
            return plain
        frugal = recompute_all(draft)
        searches = self._search(frugal, assignment, profile)
        improve(searches, self.rollouts)
        programs = [self.within_memory(ordered(frugal, searches), profile)]
        if float(profile.memory.peak_bytes(plain).max()) <= limit:
            programs.append(plain)
        seconds = decisive(np.array([packed_iteration_s(program, profile) for program in programs]))
        return programs[int(seconds.argmin())]

    def _search(self, draft: Program, assignment: Assignment, profile: Profile) -> list[Search]:
        """The first schedule of every replica."""
        rules = Rules(tuple(self.llm_leads), tuple(self.holds), self.alternate)
        return [Search(replica, rules) for replica in replicas_of(draft, assignment, profile)]


def ordered(draft: Program, searches: list[Search]) -> Program:
    """The program in the order that searches found."""
    slot = np.zeros(int(draft.first_action[-1]), np.int64)
    for found in searches:
        slot[found.replica.own] = found.place
    slots = [
        Slots(slot[draft.forward_actions(index)], slot[draft.backward_actions(index)])
        for index in range(len(draft.chunks))
    ]
    return reorder(draft, slots)
