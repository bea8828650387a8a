"""Samples and items on groups of every width of a layout, for training on ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.profile import Profile
from entrain_bench.program.assignment import Assignment, ModuleAssignment
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench_strategies.braid import BraidAssigner, BraidPlanner

# Overrides: groups of several CP; of several TP as well; of a wider TP than the LLM's weights.
EVERY = (
    "strategy=braid",
    "strategy.planner._target_=support.train.widths.WidthsPlanner",
    "strategy.assigner._target_=support.train.widths.EveryWidth",
)
SLICED = (*EVERY, "strategy.planner._target_=support.train.widths.SlicedPlanner")
HALVED = (*EVERY, "strategy.planner._target_=support.train.widths.HalvedPlanner")


@dataclass(frozen=True, slots=True)
class WidthsPlanner(BraidPlanner):
    """Every module whole on every rank, with groups of the given (TP, CP)."""

    groups: ClassVar[tuple[tuple[int, int], ...]] = ((1, 1), (1, 2), (1, 4))

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:  # noqa: ARG002
        job = profile.job
        ranks = np.arange(job.cluster.num_ranks).reshape(-1, 1, 1)
        again = job.request.recompute or ()
        return Layout(
            tuple(
                ModuleLayout(module.name, 1, 1, (len(module.layers),), ranks, module.name in again, widths=self.groups)
                for module in job.model.modules
            ),
            1,
        )


class SlicedPlanner(WidthsPlanner):
    """The same with groups that compute with slices of weights."""

    groups: ClassVar[tuple[tuple[int, int], ...]] = ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4))


class HalvedPlanner(SlicedPlanner):
    """The same with the LLM's weights split over TP 2; groups of TP 4 take slices of the halves."""

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:
        layout = super().plan(profile, make_program)
        halves = layout.modules[-1].ranks.reshape(-1, 1, 2)
        llm = replace(layout.modules[-1], tp=2, ranks=halves, widths=((2, 1), (4, 1), (2, 2)))
        return replace(layout, modules=(*layout.modules[:-1], llm))


@dataclass(frozen=True, slots=True)
class EveryWidth(BraidAssigner):
    """Samples one after the other, each in the next group of all widths but one; items in others than their sample."""

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        model, labels = profile.job.model, []
        for index, (module, placed) in enumerate(zip(model.modules, layout.modules, strict=True)):
            units = module.units(shapes)
            owner = module.owners(shapes, units)
            place = owner if module is model.llm else np.arange(len(owner)) + index + 1
            # From the widest on.
            labels.append(ModuleAssignment(placed.copies - 1 - 3 * place % placed.copies, owner))
        return Assignment(tuple(labels))
