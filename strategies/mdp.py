"""Encoders apart from the LLM's schedule, on the same ranks: modality-decoupled parallelism, Optimus, and DEP.

The items of an LLM replica's whole iteration are spread over its ranks. Their forwards run before the LLM's schedule
and their backwards after it (LongCat-Flash-Omni, arXiv:2511.00279), as in Megatron-LM (NVIDIA-NeMo/Megatron-Bridge,
issue 1554; ``megatron/core/mdp``, 2026-09). Optimus as DIP's paper runs it (arXiv:2504.14145; Optimus itself:
arXiv:2408.03505) has the same three phases for any placement. DEP (Kimi K2.5, arXiv:2602.02276, section 4.5.1; K3,
arXiv:2607.24653, section 5.2.3) spreads the items of the whole batch over all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from entrain_bench.balancing.interleaved import interleaved_phases
from entrain_bench.balancing.lpt import arrival_places
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.recomputation import Recomputation
from entrain_bench.balancing.schedules import check_colocated, three_phase_program
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import BoolArray, FloatArray, IntArray
from entrain_bench.base.compiled import njit
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment, ModuleAssignment
from entrain_bench.program.layout import Layout, ModuleLayout, find_ratio
from entrain_bench.specs.parse import Count, OneOf
from entrain_bench.specs.shapes import SampleShapes

# Costs are compared as integers, as in Megatron-LM: nanoseconds.
UNITS_PER_S = 1e9
# An item goes to the rank that feeds the LLM if its excess over the least load is within this share of the item
# (1/1000).
SLACK_PERMILLE = 10
# A backward takes as long as two forwards; DEP's of an encoder is preceded by another forward.
LLM_FORWARDS = 3
ENCODER_FORWARDS = 4


@dataclass(frozen=True, slots=True)
class SpreadItems:
    """Samples in arrival order; each LLM replica's items by LPT over the encoder replicas on its ranks.

    They run in one pass, or in several if whole encoders are recomputed, since a backward then holds all of its pass.

    Attributes:
        pass_tokens: tokens that a rank encodes at once if whole encoders are recomputed; a longer item runs alone.
    """

    pass_tokens: Count = 8192

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
            number: IntArray = np.zeros(len(worker), np.int64)
            if placed.recompute_whole:
                tokens = module.lengths(shapes, module.units(shapes))
                number = cut_passes(worker, np.zeros(len(worker), bool), tokens, self.pass_tokens)
            modules.append(ModuleAssignment(np.asarray(worker), number))
        return Assignment((*modules, ModuleAssignment(replica, microbatch)))


@dataclass(frozen=True, slots=True)
class BalancedVision:
    """Samples in arrival order; the items of the whole batch by LPT over all encoder replicas.

    With layouts whose groups of ranks can share an item, long items are encoded first (``share_long``).

    Attributes:
        load: balanced quantity: ``patches`` (an encoder's tokens), ``items``, or estimated ``seconds``.
        pass_tokens: tokens that a rank encodes at a time; a longer item is encoded alone.
        bubbles: whether ranks with longer bubbles encode more items (K3), except of each rank's first microbatch.
    """

    handles_widths: ClassVar[bool] = True

    load: Annotated[str, OneOf(("patches", "items", "seconds"))] = "patches"
    pass_tokens: Count = 8192
    bubbles: bool = True

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """LLM labels by arrival; encoder replicas by load, microbatches by the pass in which an item is encoded."""
        job = profile.job
        *encoders, llm = layout.modules
        replica, microbatch = arrival_places(len(shapes), job.microbatch_size, llm.dp)
        num_ranks = llm.pp // llm.stages_per_rank
        place = np.zeros(1 + int(llm.ranks.max()), np.int64)
        place[llm.ranks[:, :num_ranks]] = np.arange(num_ranks)[:, None]
        llm_s = profile.estimates.units(job.model.llm, shapes, llm.tp, llm.cp, llm.expert_groups).sum()
        stage_s = LLM_FORWARDS * llm_s / (llm.dp * layout.num_microbatches * llm.pp)
        modules = []
        for module, placed in zip(job.model.encoders, encoders, strict=True):
            owner = shapes.item_sample[module.units(shapes)]
            tokens = module.lengths(shapes, module.units(shapes))
            seconds = profile.estimates.units(module, shapes, placed.tp, placed.cp)
            loads = {"patches": tokens, "items": np.ones_like(tokens), "seconds": seconds * UNITS_PER_S}
            cost: IntArray = np.rint(loads[self.load]).astype(np.int64)
            local = endpoints(placed, llm)[replica[owner]]
            load = np.zeros(placed.dp, np.int64)
            worker, number = share_long(cost, seconds, placed, load)
            alone = worker < 0
            later = self.bubbles & (microbatch[owner] >= num_ranks)
            for mine in (np.flatnonzero(~later & alone), np.flatnonzero(later & alone)):
                anywhere = np.zeros_like(mine)
                worker[mine] = spread(cost[mine], anywhere, placed.dp, local[mine], load, SLACK_PERMILLE)
                waits_s = stage_s * place[placed.ranks[:, 0, 0]]
                load -= np.rint(waits_s * (cost.sum() / (ENCODER_FORWARDS * max(seconds.sum(), 1e-9)))).astype(np.int64)
            group = (2 * worker + later)[alone]
            passes = cut_passes(group, later[alone], tokens[alone], self.pass_tokens)
            number[alone] = 1 + int(number.max(initial=-1)) + passes
            modules.append(ModuleAssignment(worker, number))
        return Assignment((*modules, ModuleAssignment(replica, microbatch)))


def share_long(cost: IntArray, seconds: FloatArray, placed: ModuleLayout, load: IntArray) -> tuple[IntArray, IntArray]:
    """Group of ranks of each item longer than an even share of all, and its place; -1 for others ``[2, items]``.

    Kimi K3's report splits huge images over sub-groups of context parallelism, but gives no rule. Our rule: an item
    that takes longer than an even share of all items takes the narrowest group in which its part does not, or the
    widest one. By falling seconds, each goes to the first free group. ``load`` grows by the parts ``[replicas]``.
    """
    group, place = np.full((2, len(cost)), -1)
    widths = np.array([cp for _, cp in placed.degrees])
    share_s = seconds.sum() / placed.dp
    level = np.searchsorted(share_s * widths[:-1], seconds) if len(widths) > 1 else np.zeros_like(cost)
    before = np.cumsum(placed.num_groups) - placed.num_groups
    falling = np.argsort(-decisive(seconds), kind="stable")
    for number, item in enumerate(falling[level[falling] > 0].tolist()):
        width = int(widths[level[item]])
        loads = load[: placed.num_groups[level[item]] * width].reshape(-1, width)
        best = int(loads.max(axis=1).argmin())
        loads[best] = loads[best].max() + -(-cost[item] // width)
        group[item] = before[level[item]] + best
        place[item] = number
    return group, place


def cut_passes(group: IntArray, later: BoolArray, tokens: IntArray, most: int) -> IntArray:
    """Pass of each item: those of a group in order, of some ``most`` tokens each, ``later`` ones last ``[items]``."""
    order = np.argsort(group, kind="stable")
    before = np.cumsum(tokens[order]) - tokens[order]
    _, start, size = np.unique(group[order], return_index=True, return_counts=True)
    number = np.empty_like(order)
    number[order] = (before - np.repeat(before[start], size)) // most
    return later * (1 + int(number.max(initial=0))) + number


@dataclass(frozen=True, slots=True)
class DecoupledScheduler(Recomputation):
    """All encoder forwards, the LLM's (interleaved) 1F1B as if there were no encoder, all encoder backwards."""

    handles_widths: ClassVar[bool] = True

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """The program; ``IncompatibleError`` if an encoder is not on exactly the LLM's ranks."""
        check_colocated(layout)
        phases = interleaved_phases if layout.modules[-1].stages_per_rank > 1 else three_phase_program
        return self.within_memory(phases(profile.job.model, shapes, layout, assignment), profile)


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
