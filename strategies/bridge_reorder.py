"""Intra-microbatch reordering as Megatron-Bridge ships it (NVIDIA-NeMo/Megatron-Bridge, pull request 4608).

The samples that all replicas process in one microbatch step are dealt out anew by their number of vision patches, as
many to each replica. It is DistTrain's first reordering (arXiv:2408.04275, section 5.2), a microbatch at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import ClassVar

import numpy as np

from entrain_bench.balancing.lpt import balanced_groups
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import IncompatibleError, require
from entrain_bench.program.assignment import Assignment, ModuleAssignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes


@dataclass(frozen=True, slots=True)
class PatchBalance:
    """Equal-count LPT over the least common multiple of the modules' DP, inside each microbatch step.

    No sample leaves its microbatch. Costs are counts that the data shows, so that there is nothing to misjudge.

    Attributes:
        encoder_weight: cost of an encoder token (a patch).
        llm_weight: cost of an LLM token.
        carry: whether a group's load in the steps before counts; the original balances each step by itself.
    """

    handles_generators: ClassVar[bool] = True

    encoder_weight: float = 1.0
    llm_weight: float = 0.0
    carry: bool = False

    def __post_init__(self) -> None:
        for name in ("encoder_weight", "llm_weight"):
            value = getattr(self, name)
            require(value >= 0, f"strategy.assigner.{name}", value, "at least 0")
        some = self.encoder_weight + self.llm_weight > 0
        require(some, "strategy.assigner.encoder_weight", self.encoder_weight, "positive, or llm_weight must be")

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Replica of every sample in every module; microbatches by arrival.

        Raises:
            IncompatibleError: if the samples of a microbatch step do not fill as many groups evenly.
        """
        job = profile.job
        model = job.model
        llm = layout.modules[job.model.llm_index]
        step = job.microbatch_size * llm.dp
        num_groups = lcm(*(placed.dp for placed in layout.modules))
        if step % num_groups:
            raise IncompatibleError(
                f"strategy.assigner=bridge_reorder: the {step} samples of a microbatch step (microbatch_size="
                f"{job.microbatch_size} x dp={llm.dp}) do not divide among {num_groups} groups, the least common "
                "multiple of the modules' dp"
            )
        cost = self.costs(shapes, model)
        group = np.empty(len(shapes), np.int64)
        load = np.zeros(num_groups)
        for first in range(0, len(shapes), step):
            part = slice(first, first + step)
            group[part] = balanced_groups(cost[part], num_groups, load, fewest_first=False)
            if self.carry:
                load += np.bincount(group[part], weights=cost[part], minlength=num_groups)
        microbatch = np.arange(len(shapes)) // step
        modules = []
        for module, placed in zip(model.modules, layout.modules, strict=True):
            samples = module.owners(shapes, module.units(shapes))
            # Neighbouring groups make up a replica, so that replicas of two modules hold the same samples.
            replica = group[samples] // (num_groups // placed.dp)
            modules.append(ModuleAssignment(replica, microbatch[samples]))
        return Assignment(tuple(modules))

    def costs(self, shapes: SampleShapes, model: ModelSpec) -> FloatArray:
        """Cost of each sample ``[samples]``."""
        total = self.llm_weight * shapes.llm_tokens.astype(np.float64)
        for module in model.encoders:
            units = module.units(shapes)
            lengths = module.lengths(shapes, units).astype(np.float64)
            total += self.encoder_weight * shapes.sum_items(units, lengths)
        return total
