"""Megatron-LM style baselines: homogeneous layouts, samples in arrival order, 1F1B.

The encoder uses the LLM's TP, CP and DP. Both placements that frameworks offer are considered: on the first LLM stage,
or on leading stages of its own; a generator sits on the last LLM stage, or on trailing ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import chain
from typing import Annotated, ClassVar

import numpy as np

from entrain_bench.balancing.candidates import Candidate, Draft, rising_candidates
from entrain_bench.balancing.experts import with_experts
from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.lpt import arrival_places
from entrain_bench.balancing.options import TrialOptions
from entrain_bench.balancing.planning import (
    average_layer_s,
    chain_ranks,
    chain_starts,
    partition_layers,
    partitions,
    place_chain,
    place_ranks,
    recompute_choices,
    recompute_factor,
    spread_blocks,
    stage_sums,
)
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.rank_groups import step_assignment
from entrain_bench.balancing.tuning import chosen_layout
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import UserError, require
from entrain_bench.program.assignment import Assignment, same_microbatches
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.job import Degrees
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.parse import Count, OneOf
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.specs.sharding import SHARDINGS

# Share of an estimate that is below it whichever way its sums are rounded.
BELOW = 1.0 - 1e-6

type Layers = list[tuple[int, ...]]
"""Layers of each stage, for every module of the model."""


@dataclass(frozen=True, slots=True)
class ScheduleKind:
    """Requirements of a schedule on a layout."""

    virtual_stages: int = 1  # stages that each rank of a pipeline holds
    order: str = "loop"  # how they follow each other over the ranks (``place_ranks``)
    split_backward: bool = False  # whether backwards are split

    @property
    def bubble(self) -> float:
        """Fill and drain of an even pipeline relative to 1F1B's where F = B = W (arXiv:2401.10241, sections 2.3, 6)."""
        return (1 / 3 if self.split_backward else 1.0) / self.virtual_stages


SCHEDULES = {
    "1f1b": ScheduleKind(),
    "interleaved": ScheduleKind(virtual_stages=2),
    "zb_h1": ScheduleKind(split_backward=True),
    "zb_v": ScheduleKind(virtual_stages=2, order="v", split_backward=True),
}


@dataclass(frozen=True, slots=True)
class MegatronPlanner(TrialOptions):
    """Picks degrees, placement and layers per stage by the 1F1B time of an average shape, then by trial runs.

    Attributes:
        placement: ``first_stage``, ``leading_stages``, or ``auto`` for either.
        split: LLM layers per stage. ``balanced``: the slowest stage is fastest. ``uniform``: equally many blocks on
            every stage, encoders on the first. ``ends``: as ``uniform``, except the first and the last stage, whose
            numbers make the slowest stage fastest (Megatron-LM's ``--decoder-first-pipeline-num-layers`` and
            ``-last-``). For a model with experts, stages of about equal bytes of states are candidates, too.
        virtual_stages: stages that each rank of a pipeline holds.
        virtual_order: how they follow each other over the ranks: ``loop``, or ``v`` for two down the ranks and back.
        schedules: those of ``SCHEDULES`` that are considered, each with ``num_trials``; none: the one that the options
            above make, of whole backwards unless the scheduler splits them.
    """

    handles_generators: ClassVar[bool] = True
    shardings: ClassVar[tuple[str, ...]] = SHARDINGS
    placement: Annotated[str, OneOf(("auto", "first_stage", "leading_stages"))] = "auto"
    split: Annotated[str, OneOf(("balanced", "uniform", "ends"))] = "balanced"
    virtual_stages: Count = 1
    virtual_order: Annotated[str, OneOf(("loop", "v"))] = "loop"
    schedules: tuple[Annotated[str, OneOf(tuple(SCHEDULES))], ...] = ()

    def __post_init__(self) -> None:
        turns = self.virtual_order == "loop" or self.virtual_stages == 2
        require(turns, "strategy.planner.virtual_stages", self.virtual_stages, "2 with virtual_order=v")
        fits = self.split == "balanced" or self.placement != "leading_stages"
        require(fits, "strategy.planner.placement", self.placement, "auto or first_stage with split=uniform")

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:
        """The fastest of the most promising candidates that fit memory."""
        samples = profile.samples.draw(self.profile_samples)
        one = ScheduleKind(self.virtual_stages, self.virtual_order)
        considered = [SCHEDULES[name] for name in self.schedules] or [one]
        most_turns = max(schedule.virtual_stages for schedule in considered)

        @cache
        def measured(size: int, tp: int, cp: int) -> list[FloatArray]:
            return average_layer_s(profile.for_job(profile.job.with_microbatch_size(size)), samples, tp, cp)

        @cache
        def costs(size: int, tp: int, cp: int, recompute: tuple[bool, ...]) -> LayerCosts:
            pairs = zip(measured(size, tp, cp), recompute, strict=True)
            layers_s = tuple(layer_s * recompute_factor(again) for layer_s, again in pairs)
            return LayerCosts(profile.job.model, layers_s, most_turns * profile.job.cluster.num_ranks // (tp * cp))

        def candidates(schedule: ScheduleKind, sized: Profile, by_memory: bool = False) -> Iterator[Candidate]:
            drafts = [*self._drafts(sized, costs, schedule, make_program.chooses_recomputation, by_memory)]
            if not drafts and (self.split != "balanced" or schedule.virtual_stages > 1):
                llm = profile.job.model.llm
                turns = schedule.virtual_stages
                raise UserError(
                    f"strategy.planner.virtual_stages={turns} split={self.split}: the {len(llm.layers) - 2} blocks of "
                    f"{llm.name} cannot be spread over the stages of any requested layout"
                )
            return rising_candidates(drafts)

        first, *others = (partial(candidates, schedule) for schedule in considered)
        # A block of experts weighs as much as its time does not tell: stages of equal time may not fit.
        if profile.job.model.llm.config.experts is not None and self.placement != "leading_stages":
            others.append(partial(candidates, considered[0], by_memory=True))
        return chosen_layout(profile, first, make_program, self.num_trials, others)

    def _drafts(
        self,
        profile: Profile,
        costs: Callable[..., LayerCosts],
        schedule: ScheduleKind,
        chosen_later: bool,
        by_memory: bool,
    ) -> Iterator[Draft]:
        job = profile.job
        turns = schedule.virtual_stages

        def place(
            least_s: float, degrees: Degrees, layers: Layers, recompute: tuple[bool, ...], leading: bool
        ) -> Candidate:
            layout = place_chain(
                job, degrees, layers, recompute, leading, turns, schedule.order, schedule.split_backward
            )
            return Candidate(least_s + profile.programs.step_s(layout), layout)

        def add(degrees: Degrees, layers: Layers, recompute: tuple[bool, ...], leading: bool) -> Draft:
            seconds = costs(job.microbatch_size, degrees.tp, degrees.cp, recompute)
            stages = seconds.stage_s(degrees.pp * turns, layers, leading)
            ranks = np.bincount(place_ranks(degrees.pp, turns, schedule.order), weights=stages)
            behind = job.num_microbatches(degrees.dp)
            least_s = float(ahead * ranks.sum() + (behind - ahead) * ranks.max())
            return Draft(least_s, partial(place, least_s, degrees, layers, recompute, leading))

        ahead = schedule.bubble
        for degrees in job.degrees():
            state_bytes = _state_bytes(profile, degrees) if by_memory else None
            for recompute in recompute_choices(job, chosen_later=chosen_later):
                seconds = costs(job.microbatch_size, degrees.tp, degrees.cp, recompute)
                behind = job.num_microbatches(degrees.dp)
                for layers, leading in self._splits(job.model, degrees.pp, turns, seconds, state_bytes):
                    slowest_s = max(seconds.total_s / degrees.pp, seconds.slowest_apart_s(layers) if leading else 0.0)
                    bound_s = BELOW * (ahead * seconds.total_s + (behind - ahead) * slowest_s)
                    yield Draft(bound_s, partial(add, degrees, layers, recompute, leading))

    def _splits(
        self, model: ModelSpec, pp: int, turns: int, costs: LayerCosts, state_bytes: FloatArray | None = None
    ) -> Iterator[tuple[Layers, bool]]:
        """Layers per stage of each module, and whether others than the LLM have stages of their own, by placement.

        With ``state_bytes`` only those that balance them, with all modules on the LLM's stages.
        """
        if turns > 1 and pp == 1:
            return
        alone = len(model.modules) == 1
        places = pp * turns
        if self.placement != "leading_stages" or alone:
            others = [(len(module.layers),) for module in model.modules]
            if llm_layers := self._llm_split(costs.loaded_s if state_bytes is None else state_bytes, places):
                yield [*others[: model.llm_index], llm_layers, *others[model.llm_index + 1 :]], False
        if alone or self.placement == "first_stage" or self.split != "balanced" or state_bytes is not None:
            return
        if turns > 1 and model.generators:
            # A chain of virtual stages ends with the LLM.
            return
        encoders_s, llm_s, generators_s = (seconds.tolist() for seconds in costs.slowest_s)
        tail = range(min(1, len(generators_s) - 1), len(generators_s))
        for ahead in range(min(1, len(encoders_s) - 1), len(encoders_s)):
            ends = [(places - ahead - behind, behind) for behind in tail if 1 <= places - ahead - behind < len(llm_s)]
            if not ends:
                continue
            middle, behind = min(ends, key=lambda end: max(encoders_s[ahead], llm_s[end[0]], generators_s[end[1]]))
            counts = [ahead] * model.llm_index + [middle] + [behind] * len(model.generators)
            yield [splits[count - 1] for splits, count in zip(costs.splits, counts, strict=True)], True

    def _llm_split(self, loads: FloatArray, stages: int) -> tuple[int, ...] | None:
        """Return the layers of each stage, given the loads of the LLM's layers; None if this split does not exist."""
        num_layers = len(loads)
        if stages > num_layers:
            return None
        if self.split == "balanced":
            return partition_layers(loads, stages)
        if self.split == "ends":
            return ends_split(loads, stages)
        return None if (num_layers - 2) % stages else spread_blocks(num_layers, stages)


@dataclass(frozen=True)
class LayerCosts:
    """Seconds of a microbatch in every layer of each module at one TP, CP and recomputation, and how they are split."""

    model: ModelSpec
    layer_s: tuple[FloatArray, ...]
    most: int  # stages that they may be split into, at most

    @cached_property
    def splits(self) -> list[list[tuple[int, ...]]]:
        """Layers of each stage of every module, for 1, 2, ... stages."""
        return [partitions(layer_s, self.most) for layer_s in self.layer_s]

    @cached_property
    def loaded_s(self) -> FloatArray:
        """The LLM's layers, encoders counted with its first and generators with its last."""
        return _loaded(self.model, self.layer_s)

    @cached_property
    def total_s(self) -> float:
        """All of them together."""
        return float(sum(layer_s.sum() for layer_s in self.layer_s))

    def slowest_apart_s(self, layers: Layers) -> float:
        """Slowest stage of modules that share none."""
        llm = self.model.llm_index
        ends = len(layers[0]) if llm else 0, len(layers[llm]), len(layers[-1]) if llm + 1 < len(layers) else 0
        return float(max(seconds[count] for seconds, count in zip(self.slowest_s, ends, strict=True)))

    @cached_property
    def slowest_s(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Slowest stage of the encoders together, the LLM and the generators together, on 0, 1, 2, ... stages."""
        llm = self.model.llm_index
        return self._slowest_s(range(llm)), self._slowest_s([llm]), self._slowest_s(range(llm + 1, len(self.layer_s)))

    def _slowest_s(self, modules: Sequence[int]) -> FloatArray:
        most = min((len(self.splits[m]) for m in modules), default=0)
        if not most:
            return np.zeros(1)
        # The stages of all numbers of stages in a row.
        sums = [stage_sums(np.tile(self.layer_s[m], most), list(chain(*self.splits[m][:most]))) for m in modules]
        number = np.arange(most)
        return np.append(0.0, np.maximum.reduceat(np.sum(sums, axis=0), number * (number + 1) // 2))

    def stage_s(self, pp: int, layers: Layers, leading: bool) -> FloatArray:
        """Seconds of a microbatch at each stage of the chain ``[pp]``; ``leading`` as in ``place_chain``."""
        stages = np.zeros(pp)
        firsts = chain_starts(self.model, pp, layers, leading)
        for first, cost, split in zip(firsts, self.layer_s, layers, strict=True):
            stages[first : first + len(split)] += stage_sums(cost, split)
        return stages


def _loaded(model: ModelSpec, layers: Sequence[FloatArray]) -> FloatArray:
    """Values of the LLM's layers, those of encoders added to its first and of generators to its last."""
    loaded = layers[model.llm_index].copy()
    loaded[0] += sum(float(values.sum()) for values in layers[: model.llm_index])
    loaded[-1] += sum(float(values.sum()) for values in layers[model.llm_index + 1 :])
    return loaded


def ends_split(loads: FloatArray, stages: int) -> tuple[int, ...] | None:
    """Return equally many blocks on all stages except first and last, at least one on each; None if impossible."""
    blocks = len(loads) - 2
    if stages == 1:
        return (blocks + 2,)
    inner = stages - 2
    splits = [
        (1 + first, *[middle] * inner, 1 + blocks - first - inner * middle)
        for middle in (range(1, blocks + 1) if inner else [0])
        for first in range(1, blocks - inner * middle)
    ]
    return min(splits, key=lambda layers: decisive(stage_sums(loads, layers).max()), default=None)


def _state_bytes(profile: Profile, degrees: Degrees) -> FloatArray:
    """Bytes of weights, gradients and optimizer states of the LLM's layers, loaded with those of other modules."""
    job = profile.job
    first = chain_ranks(job, degrees)[:, :1]
    layers = []
    for module in job.model.modules:
        count = len(module.layers)
        one_each = ModuleLayout(module.name, degrees.tp, degrees.cp, (1,) * count, np.repeat(first, count, axis=1))
        layers.append(profile.memory.stage_state_bytes(module, with_experts(job, one_each, module)))
    return _loaded(job.model, layers)


@dataclass(frozen=True, slots=True)
class ArrivalOrder:
    """Samples in order of arrival, as with Megatron's sampler; with widths, adjacent groups join if that is faster."""

    handles_generators: ClassVar[bool] = True
    handles_widths: ClassVar[bool] = True

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Replica and microbatch from the position in the batch alone."""
        if layout.modules[0].widths:
            return step_assignment(shapes, layout, profile, balanced=())
        job = profile.job
        dp = layout.modules[profile.job.model.llm_index].dp
        replica, microbatch = arrival_places(len(shapes), job.microbatch_size, dp)
        return same_microbatches(job.model, shapes, replica, microbatch, microbatch)
