"""Intra-microbatch reordering as Megatron-Bridge ships it (NVIDIA-NeMo/Megatron-Bridge, pull request 4608).

The samples that all replicas process in one microbatch step are dealt out by their number of vision patches, as many to
each replica: DistTrain's first reordering (arXiv:2408.04275, section 5.2), a microbatch at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import ClassVar

import numpy as np

from entrain_bench.balancing.lpt import balanced_in_steps
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program.assignment import Assignment, ModuleAssignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes


@dataclass(frozen=True, slots=True)
class PatchBalance:
    """Equal-count LPT by vision patches over the least common multiple of the modules' DP, inside each microbatch step.

    Attributes:
        carry: whether a group's load in the steps before counts; the original balances each step by itself.
    """

    handles_generators: ClassVar[bool] = True
    carry: bool = False

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Replica of every sample by module; ``IncompatibleError`` if a microbatch step does not fill groups evenly."""
        job = profile.job
        llm = layout.modules[job.model.llm_index]
        step = job.microbatch_size * llm.dp
        num_groups = lcm(*(placed.dp for placed in layout.modules))
        if step % num_groups:
            raise IncompatibleError(
                f"strategy.assigner=bridge_reorder: the {step} samples of a microbatch step (microbatch_size="
                f"{job.microbatch_size} x dp={llm.dp}) do not divide among {num_groups} groups, the least common "
                "multiple of the modules' dp"
            )
        patches = np.zeros(len(shapes))
        for module in job.model.encoders:
            units = module.units(shapes)
            patches += shapes.sum_items(units, module.lengths(shapes, units).astype(np.float64))
        group = balanced_in_steps(patches, num_groups, step, self.carry, fewest_first=False)
        microbatch = np.arange(len(shapes)) // step
        modules = []
        for module, placed in zip(job.model.modules, layout.modules, strict=True):
            samples = module.owners(shapes, module.units(shapes))
            # Neighbouring groups make up a replica, so that replicas of two modules hold the same samples.
            replica = group[samples] // (num_groups // placed.dp)
            modules.append(ModuleAssignment(replica, microbatch[samples]))
        return Assignment(tuple(modules))
