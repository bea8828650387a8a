"""Optimus as DIP's paper runs it (arXiv:2504.14145; Optimus itself: arXiv:2408.03505): encoders outside the LLM's 1F1B.

All encoder forwards come before the LLM, all encoder backwards behind it, on the ranks that hold both.
"""

from __future__ import annotations

from dataclasses import dataclass

from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.recomputation import Recomputation
from entrain_bench.balancing.schedules import three_phase_program
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes


@dataclass(frozen=True, slots=True)
class OptimusScheduler(Recomputation):
    """Three phases: all encoder forwards, the LLM's 1F1B, all encoder backwards."""

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """The program; ``IncompatibleError`` if stages are virtual."""
        return self.within_memory(three_phase_program(profile.job.model, shapes, layout, assignment), profile)
