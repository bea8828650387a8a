"""Entrain's schedule: 1F1B with split encoder backwards and eager forwards (section 5.3)."""

from __future__ import annotations

from dataclasses import dataclass

from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.warmup import WarmUp
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes


@dataclass(frozen=True, slots=True)
class EntrainScheduler(WarmUp):
    """1F1B in which deferred samples run backward with the LLM microbatch that took them.

    Encoder stages warm up with as many forwards as memory allows.

    Attributes:
        split_backward: whether an encoder microbatch's backward is cut; else it waits for its last deferred sample.
    """

    eager: str = "encoder"
    split_backward: bool = True

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """The program; warm-up grows with free memory, one stage at least one forward ahead of the next."""
        return self.in_chain(shapes, layout, assignment, profile, self.split_backward)
