"""DIP's schedule: segments of all modules interleaved on every rank, by believed durations (arXiv:2504.14145)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from entrain_bench.balancing.options import check_choices, check_least
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.recomputation import Recomputation, recompute_all, recompute_by_chunk
from entrain_bench.balancing.schedules import ordered_program, unordered_program
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.errors import IncompatibleError, require
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes

from .search import best_slots
from .segments import believed_s, build_segments

PRIORITIES = ("microbatch", "modality")
# Every rollout is a node in the tree of every set of lanes, some 60 bytes each.
MAX_ROUNDS = 2**20


@dataclass(frozen=True, slots=True)
class DipScheduler(Recomputation):
    """Orders the actions of every rank.

    Attributes:
        search_rounds: rollouts of the tree search over the order of microbatches, each of all replicas; 0 keeps the
            order of arrival.
        search_seconds: wall time after which no rollout starts; the order then depends on the machine.
        priorities: what the search puts in order: the part of each ``modality`` of every microbatch, or all of a
            ``microbatch``.
    """

    handles_generators: ClassVar[bool] = True

    search_rounds: int = 16
    search_seconds: float | None = None
    priorities: str = "modality"
    memory: str = field(default="greedy", kw_only=True)

    def __post_init__(self) -> None:
        Recomputation.__post_init__(self)
        check_choices(self, "strategy.scheduler", priorities=PRIORITIES)
        check_least(self, "strategy.scheduler", 0, "search_seconds")
        few = 0 <= self.search_rounds <= MAX_ROUNDS
        require(few, "strategy.scheduler.search_rounds", self.search_rounds, f"at least 0, at most {MAX_ROUNDS}")

    def draft(self) -> DipScheduler:
        """The greedy order, with which the search begins."""
        return replace(self, search_rounds=0, memory="module" if self.memory == "module" else "greedy")

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """The program.

        Raises:
            IncompatibleError: if a stage spans several lanes (modules that share some ranks with different TP or CP),
                for the interleaver gives each action one lane.
        """
        if any(np.any(np.diff(blocks.offsets) != 1) for blocks in layout.blocks):
            raise IncompatibleError(
                "strategy.scheduler: DIP's interleaver needs the same TP x CP for modules on the same ranks"
            )
        draft = unordered_program(profile.job.model, shapes, layout, assignment)
        if not self.chooses_recomputation or profile.job.request.recompute is not None:
            return self._ordered(draft, assignment, profile)
        exact = self.memory == "exact"
        frugal = recompute_by_chunk(self._ordered(recompute_all(draft), assignment, profile), profile, exact)
        # What is recomputed now may deserve another order, which may leave memory for more.
        again = recompute_by_chunk(self._ordered(frugal, assignment, profile), profile, exact)
        seconds = decisive(np.array([believed_s(profile, program) for program in (frugal, again)]))
        return frugal if seconds[0] <= seconds[1] else again

    def _ordered(self, draft: Program, assignment: Assignment, profile: Profile) -> Program:
        """The program in the order that the search finds."""
        segments = build_segments(draft, assignment, profile, by_module=self.priorities == "modality")
        return ordered_program(draft, best_slots(segments, self.search_rounds, self.search_seconds))
