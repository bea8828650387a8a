"""DynaPipe's microbatches: sorted samples cut by a dynamic program, dealt to replicas by Karmarkar-Karp."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entrain_bench.balancing.differencing import largest_differencing
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import IntArray, rows_of
from entrain_bench.base.errors import require, unknown_choice
from entrain_bench.program.assignment import Assignment, same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes

from .costs import Costs, believed_costs
from .partition import cuttable

ORDERS = ("encoder", "llm", "time", "arrival")


@dataclass(frozen=True, slots=True)
class DynaPipeAssigner:
    """Sorts samples, cuts them into microbatches of least estimated iteration time, balances replicas.

    Attributes:
        order: what samples are sorted by, falling. ``encoder``: encoder tokens, then LLM tokens, the order that the
            paper has for samples of two lengths; ``llm``: LLM tokens, then encoder tokens; ``time``: believed time on
            the slowest stage; ``arrival``: as they come.
        limit_step: by how much a limit on the slowest microbatch is above the one before, relative; the estimate is
            within that of the best cuts.
    """

    order: str = "encoder"
    limit_step: float = 0.05

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise unknown_choice("strategy.assigner.order", self.order, ORDERS)
        step = self.limit_step
        require(0.001 <= step <= 10, "strategy.assigner.limit_step", step, "at least 0.001, at most 10")

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Replica and microbatch of every sample; a replica's microbatches keep the order of the samples.

        Raises:
            IncompatibleError: if the modules form no chain, or differ in DP.
        """
        costs = believed_costs(profile, shapes, layout)
        dp = layout.modules[-1].dp
        samples = self._sorted(shapes, profile, costs)
        ranges = cuttable(costs, samples, dp)
        starts = ranges.cut(costs.num_stages, dp, self.limit_step)
        replica = largest_differencing(ranges.of_ranges(starts), dp)
        # Place of each microbatch among its replica's.
        place = np.empty(len(starts), np.int64)
        for one in range(dp):
            own = np.flatnonzero(replica == one)
            place[own] = np.arange(len(own))
        microbatch = np.empty(len(samples), np.int64)
        microbatch[samples] = rows_of(np.append(starts, len(samples)))
        return same_microbatches(profile.job.model, shapes, replica[microbatch], place[microbatch], place[microbatch])

    def _sorted(self, shapes: SampleShapes, profile: Profile, costs: Costs) -> IntArray:
        """The samples, the longest first; of equal ones the earlier first."""
        if self.order == "arrival":
            return np.arange(len(shapes))
        if self.order == "time":
            weight = costs.forward + costs.backward
            slowest = (weight[:, :, None] * costs.sample_s[None]).sum(axis=1).max(axis=0)
            return np.argsort(-decisive(slowest), kind="stable")
        modalities = [name for module in profile.job.model.encoders for name in module.config.modalities]
        encoder, llm = shapes.encoder_tokens(modalities), shapes.llm_tokens
        keys = (-llm, -encoder) if self.order == "encoder" else (-encoder, -llm)
        return np.lexsort(keys)
