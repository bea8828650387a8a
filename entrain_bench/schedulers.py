"""Schedulers that several systems share."""

from __future__ import annotations

from dataclasses import dataclass

from entrain_bench.assignment import Assignment
from entrain_bench.layout import Layout
from entrain_bench.profile import Profile
from entrain_bench.program import Program
from entrain_bench.schedules import chain_program, stages_behind
from entrain_bench.shapes import SampleShapes


@dataclass(frozen=True, slots=True)
class OneForwardOneBackward:
    """1F1B over the chain of encoder and LLM stages; a microbatch's encoder and LLM parts keep the same place."""

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """The program; every lane warms up with as many forwards as stages follow it.

        Raises:
            IncompatibleError: if encoder and LLM do not form a chain.
        """
        return chain_program(profile.job.model, shapes, layout, assignment, stages_behind(layout))
