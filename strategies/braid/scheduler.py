"""The order of actions on every rank."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import ClassVar

import numpy as np

from entrain_bench.balancing.beliefs import packed_iteration_s
from entrain_bench.balancing.options import check_least
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.recomputation import Recomputation, recompute_all
from entrain_bench.balancing.schedules import unordered_program
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.errors import IncompatibleError, require
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes

from .replicas import Replica, recomputing, replicas_of
from .search import Rules, Search, improve, ordered

# Rollouts for a program that a planner only compares or checks.
DRAFT_ROLLOUTS = 24
# Share of the memory that plans may use up to which an order does not count as held up by it.
AMPLE = 0.85
# Seconds that a rollout takes for an action (0.38 to 0.53 us on an x86-64 server, numba 0.68, 2026-11), and the share
# of a believed iteration that all rollouts of a program may take by that; a constant, so that all machines agree.
ACTION_S = 0.5e-6
AFFORDED = 0.1
# An order without recomputation is not searched for if the first is so many times as slow as one with it.
HOPELESS = 1.25


@dataclass(frozen=True, slots=True)
class BraidScheduler(Recomputation):
    """List schedules, and a search over the order of microbatches on the slowest replica.

    Attributes:
        rollouts: schedules tried beyond the first of every replica, of all replicas together.
        llm_leads: numbers of microbatches by which the LLM's actions go before encoders', each tried; (0,): none.
        holds: encoder backwards that take so many times as long as the LLM's mean one wait until their ranks have done
            all of the LLM, each tried; 0: none wait.
        alternate: whether forwards and backwards that could both run take turns; otherwise backwards go first.
        aheads: where memory is short: numbers of microbatches by which encoder forwards may be ahead of the LLM's and
            still go before them, each tried; 0: as ``llm_leads`` says.
        keeps: where memory is short: shares of it up to which activations are kept while a search makes its orders,
            each tried; 0: all are recomputed.
        goes_on: whether searches go on with what their best order has memory for.
    """

    handles_generators: ClassVar[bool] = True

    rollouts: int = 256
    llm_leads: tuple[int, ...] = (1000, 8)
    holds: tuple[float, ...] = (0, 50, 20)
    alternate: bool = True
    aheads: tuple[int, ...] = (0, 4)
    keeps: tuple[float, ...] = (0, 1)
    goes_on: bool = True
    memory: str = field(default="greedy", kw_only=True)

    def __post_init__(self) -> None:
        Recomputation.__post_init__(self)
        check_least(self, "strategy.scheduler", 0, "rollouts")
        for name in ("holds", "llm_leads", "aheads"):
            values = [*getattr(self, name)]
            require(bool(values) and min(values) >= 0, f"strategy.scheduler.{name}", values, "numbers of 0 or more")
        keeps = [*self.keeps]
        in_range = bool(keeps) and min(keeps) >= 0 and max(keeps) <= 1
        require(in_range, "strategy.scheduler.keeps", keeps, "numbers from 0 to 1")

    def draft(self) -> BraidScheduler:
        """A shorter search."""
        memory = "greedy" if self.memory == "exact" else self.memory
        keeps, aheads = self.keeps[:1], self.aheads[:1]
        rollouts = min(self.rollouts, DRAFT_ROLLOUTS)
        return replace(self, rollouts=rollouts, memory=memory, keeps=keeps, aheads=aheads, goes_on=False)

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """The program.

        Raises:
            IncompatibleError: if weights are sharded, for replicas would have to run their passes in one order.
        """
        for own in layout.modules:
            if own.sharded:
                raise IncompatibleError(
                    f"schedule: weights of {own.module} are sharded; Braid orders replicas one by one"
                )
        draft = unordered_program(profile.job.model, shapes, layout, assignment)
        limit = profile.job.planning_budget_bytes
        searches = self._search(draft, assignment, profile)
        first = ordered(draft, searches)
        is_ample = float(profile.memory.peak_bytes(first).max()) <= AMPLE * limit
        afforded = afforded_rollouts(searches)
        rollouts = min(self.rollouts, afforded)
        if is_ample or not self.chooses_recomputation or profile.job.request.recompute is not None:
            improve(searches, rollouts)
            return ordered(draft, searches)
        programs = self._frugal(draft, [search.replica for search in searches], profile, afforded)
        best_s = min(seconds := [packed_iteration_s(program, profile) for program in programs])
        if decisive(max(search.end_s for search in searches)) <= decisive(HOPELESS * best_s):
            improve(searches, rollouts)
            plain = ordered(draft, searches)
            if float(profile.memory.peak_bytes(plain).max()) <= limit:
                programs.append(plain)
                seconds.append(packed_iteration_s(plain, profile))
        return programs[int(decisive(np.array(seconds)).argmin())]

    def _frugal(self, draft: Program, plain: list[Replica], profile: Profile, afforded: int) -> list[Program]:
        """Programs that recompute what their orders leave no memory for: of every search, and of one that goes on.

        A search does not know what its order will have memory for: it either counts everything as recomputed, or lets
        the list scheduler keep what there is room for as it goes. Then it goes on with what its best order kept.
        As many kinds of searches are made as can afford their rollouts, one at least.
        """
        frugal, found = recompute_all(draft), []
        replicas = recomputing(plain, frugal, profile, draft)
        rollouts = min(self.rollouts, afforded) // (2 if self.goes_on else 1)
        kinds = max(1, afforded // max(1, self.rollouts))
        for keep, ahead in islice(product(self.keeps, self.aheads), kinds):
            rules = replace(self._rules, ahead=ahead, keep=keep)
            searches = [Search(replica, rules) for replica in replicas]
            improve(searches, rollouts)
            found.append(self.within_memory(ordered(frugal, searches), profile))
            if self.goes_on:
                again = recomputing(plain, found[-1], profile)
                searches = [Search(each, rules, search.best) for each, search in zip(again, searches, strict=True)]
                improve(searches, rollouts)
                found.append(self.within_memory(ordered(frugal, searches), profile))
        return found

    @property
    def _rules(self) -> Rules:
        return Rules(tuple(self.llm_leads), tuple(self.holds), self.alternate)

    def _search(self, draft: Program, assignment: Assignment, profile: Profile) -> list[Search]:
        """The first schedule of every replica."""
        return [Search(replica, self._rules) for replica in replicas_of(draft, assignment, profile)]


def afforded_rollouts(searches: list[Search]) -> int:
    """Rollouts of a program that take no more than their share of a believed iteration, the longest first schedule."""
    believed_s = max(search.end_s for search in searches)
    num_actions = max(len(search.replica.own) for search in searches)
    return int(decisive(AFFORDED * believed_s / (ACTION_S * num_actions)))
