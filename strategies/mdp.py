"""Encoders apart from the LLM's schedule, on the same ranks: modality-decoupled parallelism, and Optimus.

The items of an LLM replica's whole iteration are spread over its ranks, encoded before the LLM's schedule begins, and
go backward when it has ended (LongCat-Flash-Omni, arXiv:2511.00279), as in Megatron-LM (NVIDIA-NeMo/Megatron-Bridge,
issue 1554; ``megatron/core/mdp``, 2026-09). Optimus as DIP's paper runs it (arXiv:2504.14145; Optimus itself:
arXiv:2408.03505) has the same three phases for any placement.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entrain_bench.balancing.lpt import arrival_places
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.recomputation import Recomputation
from entrain_bench.balancing.schedules import check_colocated, check_routes, three_phase_program
from entrain_bench.base.arrays import IntArray
from entrain_bench.base.compiled import njit
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment, ModuleAssignment
from entrain_bench.program.layout import Layout, ModuleLayout, find_ratio
from entrain_bench.specs.shapes import SampleShapes

# Costs are compared as integers, as in Megatron-LM: nanoseconds.
UNITS_PER_S = 1e9
# An item goes to the rank that hands embeddings to the LLM if that has at most so much more work than the least loaded,
# in thousandths of the item's own.
SLACK_PERMILLE = 10


@dataclass(frozen=True, slots=True)
class SpreadItems:
    """Samples in arrival order; each LLM replica's items by LPT over the encoder replicas on its ranks, in one pass."""

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """LLM labels by arrival, encoder replicas by seconds; ``IncompatibleError`` without an integer DP ratio."""
        job = profile.job
        *encoders, llm = layout.modules
        replica, microbatch = arrival_places(len(shapes), job.microbatch_size, llm.dp)
        modules = []
        loads = dict[int, IntArray]()
        for module, placed in zip(job.model.encoders, encoders, strict=True):
            ratio = find_ratio(placed, llm)
            consumer = replica[shapes.item_sample[module.units(shapes)]]
            cost = np.rint(profile.estimates.units(module, shapes, placed.tp, placed.cp) * UNITS_PER_S).astype(np.int64)
            load = loads.setdefault(placed.dp, np.zeros(placed.dp, np.int64))
            first = consumer // ratio.fan_out * ratio.fan_in
            worker = spread(cost, first, ratio.fan_in, endpoints(placed, llm)[consumer], load, SLACK_PERMILLE)
            modules.append(ModuleAssignment(np.asarray(worker), np.zeros(len(worker), np.int64)))
        return Assignment((*modules, ModuleAssignment(replica, microbatch)))


@dataclass(frozen=True, slots=True)
class DecoupledScheduler(Recomputation):
    """All encoder forwards, the LLM's 1F1B as if there were no encoder, all encoder backwards; at any depth."""

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """The program; ``IncompatibleError`` if an encoder is not on exactly the LLM's ranks or an item leaves them."""
        check_colocated(layout)
        model = profile.job.model
        check_routes(model, shapes, layout, assignment, in_order=False)
        return self.within_memory(three_phase_program(model, shapes, layout, assignment), profile)


def endpoints(encoder: ModuleLayout, llm: ModuleLayout) -> IntArray:
    """Encoder replica on the first rank of each LLM replica's first stage, -1 for none ``[LLM replicas]``."""
    holder = np.full(1 + max(int(encoder.ranks.max()), int(llm.ranks.max())), -1)
    holder[encoder.ranks.reshape(encoder.dp, -1)] = np.arange(encoder.dp)[:, None]
    return holder[llm.ranks[:, 0, 0]]


@njit()
def spread(cost, first, num_workers, local, load, slack_permille):  # type: ignore[no-untyped-def]
    """Worker of each item: by falling cost, each to the least-loaded worker of its own, or the local one ``[items]``.

    An item may go to ``num_workers`` consecutive workers from its first on, and prefers a local one, -1 for none,
    within the slack, thousandths of its cost. ``load`` grows ``[workers]``.
    """
    worker = np.empty(len(cost), np.int64)
    for item in np.argsort(-cost, kind="mergesort"):
        best = first[item]
        for one in range(first[item] + 1, first[item] + num_workers):
            if load[one] < load[best]:
                best = one
        near = local[item]
        if near >= 0 and 1000 * load[near] <= 1000 * load[best] + slack_permille * max(1, cost[item]):
            best = near
        worker[item] = best
        load[best] += cost[item]
    return worker


@dataclass(frozen=True, slots=True)
class OptimusScheduler(Recomputation):
    """Three phases: all encoder forwards, the LLM's 1F1B, all encoder backwards."""

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """The program; ``IncompatibleError`` if stages are virtual."""
        return self.within_memory(three_phase_program(profile.job.model, shapes, layout, assignment), profile)
