"""Deferral alone, on the microbatches of another system: what that part of Entrain gives others."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from entrain_bench.balancing.interface import Assigner, Drafter, Observer
from entrain_bench.balancing.options import check_least
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arrays import IntArray
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.base.hosttime import each_replica_alone
from entrain_bench.program.assignment import Assignment, same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.program.timeline import Timeline
from entrain_bench.specs.shapes import SampleShapes

from .deferral import defer_pairwise


@dataclass(frozen=True, slots=True)
class DeferringAssigner:
    """Steps d to f of Algorithm 3 on microbatches that another assigner made; pairs take the place of its order.

    Attributes:
        base: makes the microbatches.
        num_bins: resolution of the subset-sum program: the heaviest microbatch of a replica spans this many bins.
    """

    base: Assigner
    num_bins: int = 512

    def __post_init__(self) -> None:
        check_least(self, "strategy.assigner", 2, "num_bins")

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Replica, encoder microbatch and LLM microbatch of every sample.

        Raises:
            IncompatibleError: if items of a sample are not in its own microbatch.
        """
        model = profile.job.model
        placed = layout.modules[-1]
        made = self.base.assign(shapes, layout, profile)
        llm = made.modules[model.llm_index]
        for module, labels in zip(model.modules, made.modules, strict=True):
            owner = module.owners(shapes, module.units(shapes))
            together = (labels.replica == llm.replica[owner]) & (labels.microbatch == llm.microbatch[owner])
            if not together.all():
                sample = shapes.name_of(owner[np.flatnonzero(~together)[0]])
                raise IncompatibleError(
                    f"strategy.assigner.base={type(self.base).__name__}: puts {module.name} items of sample {sample} "
                    "and the sample in different microbatches; deferral needs them in the same one"
                )
        _, llm_s = profile.estimates.samples(shapes, placed.tp, placed.cp)
        encoder = np.empty(len(shapes), np.int64)
        deferred = np.empty(len(shapes), np.int64)
        with each_replica_alone(placed.dp):
            for replica in range(placed.dp):
                mine: IntArray = np.flatnonzero(llm.replica == replica)
                places, microbatch = np.unique(llm.microbatch[mine], return_inverse=True)
                if len(places):
                    encoder[mine], deferred[mine] = defer_pairwise(microbatch, llm_s[mine], len(places), self.num_bins)
        return same_microbatches(model, shapes, llm.replica, encoder, deferred)

    def draft(self) -> DeferringAssigner:
        """With a quick base, if it has one."""
        return replace(self, base=self.base.draft()) if isinstance(self.base, Drafter) else self

    def observe(self, timeline: Timeline, profile: Profile) -> DeferringAssigner:
        """With what the base learns, if it does."""
        return replace(self, base=self.base.observe(timeline, profile)) if isinstance(self.base, Observer) else self
