"""Schedules of heterogeneous parallelism (arXiv:2605.27678, section 2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.recomputation import Recomputation
from entrain_bench.balancing.schedules import chain_program, check_colocated, check_routes, three_phase_program
from entrain_bench.balancing.warmup import WarmUp
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.boundary import is_disjoint
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes


@dataclass(frozen=True, slots=True)
class ColocatedScheduler(Recomputation):
    """Encoder and LLM on the same ranks, each with its own grid.

    LLM PP = 1: encoder forward, LLM forward, LLM backward, encoder backward of each microbatch in turn. LLM PP > 1:
    three phases, all encoder forwards, 1F1B of the LLM, all encoder backwards.
    """

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """The program.

        Raises:
            IncompatibleError: if an encoder is not on exactly the LLM's ranks or an item takes a wrong route.
        """
        check_colocated(layout)
        model = profile.job.model
        one_stage = layout.modules[-1].pp == 1
        check_routes(model, shapes, layout, assignment, in_order=one_stage)
        if not one_stage:
            return self.within_memory(three_phase_program(model, shapes, layout, assignment), profile)
        warmup = [np.zeros(1, np.int64)] * len(layout.modules)
        return self.within_memory(chain_program(model, shapes, layout, assignment, warmup), profile)


@dataclass(frozen=True, slots=True)
class GraphAwareScheduler(WarmUp):
    """1F1B over the stages of an encoder island and of the LLM, whose ranks are disjoint.

    An LLM first stage runs a microbatch when all its encoder inputs are there; a stage warms up with as many forwards
    as stages follow it on the longest path.
    """

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """The program.

        Raises:
            IncompatibleError: if an encoder shares ranks with the LLM or an item takes a wrong route.
        """
        *encoders, llm = layout.modules
        for placed in encoders:
            if not is_disjoint(placed, llm):
                raise IncompatibleError(
                    f"layout: a disjoint schedule needs {placed.module} and {llm.module} on different ranks"
                )
        check_routes(profile.job.model, shapes, layout, assignment, in_order=True)
        return self.in_chain(shapes, layout, assignment, profile)
