"""1F1B with rounds as microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.recomputation import Recomputation
from entrain_bench.balancing.rounds import rounds_program
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes


@dataclass(frozen=True, slots=True)
class RoundsScheduler(Recomputation):
    """Rounds in order on every stage, 1F1B."""

    handles_generators: ClassVar[bool] = True
    handles_widths: ClassVar[bool] = True

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """The program of a batch."""
        return self.within_memory(rounds_program(profile.job.model, shapes, layout, assignment), profile)
