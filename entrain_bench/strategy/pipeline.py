"""The schedule that a layout asks for: 1F1B, interleaved 1F1B, ZB-H1 or ZB-V."""

from __future__ import annotations

from dataclasses import dataclass

from entrain_bench.errors import IncompatibleError
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.strategy.interleaved import Interleaved
from entrain_bench.strategy.profile import Profile
from entrain_bench.strategy.zero_bubble import ZeroBubbleH1, ZeroBubbleV, valley_of


@dataclass(frozen=True, slots=True)
class PlannedPipeline(Interleaved):
    """What the planner counted on: ZB-V for a V, and with a split backward ZB-H1; otherwise (interleaved) 1F1B."""

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """The program.

        Raises:
            IncompatibleError: if the stages suit none of them.
        """
        zero_bubble: ZeroBubbleH1 | ZeroBubbleV
        if valley_of(profile.job.model, layout) is not None:
            zero_bubble = ZeroBubbleV(memory=self.memory)
        elif layout.split_backward:
            zero_bubble = ZeroBubbleH1(memory=self.memory)
        else:
            return Interleaved.schedule(self, shapes, layout, assignment, profile)
        if self.eager != "none":
            raise IncompatibleError(f"strategy.scheduler.eager={self.eager}: must be none with a split backward")
        return zero_bubble.schedule(shapes, layout, assignment, profile)
