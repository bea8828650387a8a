"""DistTrain's schedule: 1F1B over encoder and LLM stages with any DP of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.warmup import WarmUp
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes


@dataclass(frozen=True, slots=True)
class DistTrainScheduler(WarmUp):
    """1F1B; the k-th microbatches of all groups share their place, brokers join and split them between groups."""

    handles_generators: ClassVar[bool] = True

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """The program.

        Raises:
            IncompatibleError: if modules or microbatches do not form a chain.
        """
        check_order(profile.job.model, shapes, assignment)
        return self.in_chain(shapes, layout, assignment, profile)


def check_order(model: ModelSpec, shapes: SampleShapes, assignment: Assignment) -> None:
    """Raise ``IncompatibleError`` if an LLM microbatch comes before an encoder microbatch it needs."""
    consumer = assignment.modules[model.llm_index].microbatch
    for module, labels in zip(model.encoders, assignment.modules, strict=False):
        owner = shapes.item_sample[module.units(shapes)]
        early = np.flatnonzero(consumer[owner] < labels.microbatch)
        if early.size:
            sample = shapes.name_of(owner[early[0]])
            raise IncompatibleError(
                f"strategy.scheduler=disttrain: sample {sample} is in {model.llm.name} microbatch "
                f"{consumer[owner[early[0]]]}, before its {module.name} microbatch {labels.microbatch[early[0]]}"
            )
