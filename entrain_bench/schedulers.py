"""Schedulers that several systems share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from entrain_bench.assignment import Assignment
from entrain_bench.layout import Layout
from entrain_bench.profile import Profile
from entrain_bench.program import Program
from entrain_bench.schedules import chain_program, stages_behind
from entrain_bench.shapes import SampleShapes


@dataclass(frozen=True, slots=True)
class OneForwardOneBackward:
    """1F1B over the chain of all stages; a microbatch keeps its place in all modules."""

    handles_generators: ClassVar[bool] = True

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """The program; every lane warms up with as many forwards as stages follow it.

        Raises:
            IncompatibleError: if the modules do not form a chain.
        """
        model = profile.job.model
        return chain_program(model, shapes, layout, assignment, stages_behind(layout, model.llm_index))
