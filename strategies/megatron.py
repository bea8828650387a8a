"""A Megatron-LM style baseline: homogeneous layout, samples in arrival order, 1F1B.

The encoder uses the LLM's TP, CP and DP. Both placements that frameworks offer are considered: on the first LLM stage,
or on leading stages of its own; a generator sits on the last LLM stage, or on trailing ones. Everything is decided from
the average sample shape; what a batch contains is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar

import numpy as np

from entrain_bench.arrays import FloatArray
from entrain_bench.errors import UserError, require, unknown_choice
from entrain_bench.program.assignment import Assignment, same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.specs.job import Degrees
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.strategy.candidates import Candidate, Draft, fastest_in_trials, rising_candidates
from entrain_bench.strategy.interface import MakeProgram
from entrain_bench.strategy.planning import (
    chain_starts,
    partition_layers,
    place_chain,
    recompute_choices,
    recompute_factor,
    spread_blocks,
    stage_sums,
)
from entrain_bench.strategy.profile import Profile

type Layers = list[tuple[int, ...]]
"""Layers of each stage, for every module of the model."""

PLACEMENTS = ("auto", "first_stage", "leading_stages")
SPLITS = ("balanced", "uniform")


@dataclass(frozen=True, slots=True)
class MegatronPlanner:
    """Picks degrees, placement and layers per stage by the 1F1B time of an average shape, then by trial runs.

    Attributes:
        placement: ``first_stage``, ``leading_stages``, or ``auto`` for either.
        profile_samples: samples averaged into one shape.
        num_trials: best estimates that fit memory and run a profiled batch on trial.
        split: LLM layers so that the slowest stage is fastest (``balanced``), or as many blocks on every stage and
            encoders on the first (``uniform``).
        virtual_stages: LLM stages that each rank of a pipeline holds; if more than one, encoders are on the first.
    """

    handles_generators: ClassVar[bool] = True

    placement: str = "auto"
    profile_samples: int = 256
    num_trials: int = 8
    split: str = "balanced"
    virtual_stages: int = 1

    def __post_init__(self) -> None:
        if self.placement not in PLACEMENTS:
            raise unknown_choice("strategy.planner.placement", self.placement, PLACEMENTS)
        if self.split not in SPLITS:
            raise unknown_choice("strategy.planner.split", self.split, SPLITS)
        require(self.profile_samples >= 1, "strategy.planner.profile_samples", self.profile_samples, "at least 1")
        require(self.num_trials >= 1, "strategy.planner.num_trials", self.num_trials, "at least 1")
        require(self.virtual_stages >= 1, "strategy.planner.virtual_stages", self.virtual_stages, "at least 1")
        fits = self._is_plain or self.placement != "leading_stages"
        allowed = "auto or first_stage with split=uniform or virtual_stages"
        require(fits, "strategy.planner.placement", self.placement, allowed)

    @property
    def _is_plain(self) -> bool:
        """Whether the LLM is split like any other module; otherwise encoders ride on its first stage."""
        return self.split == "balanced" and self.virtual_stages == 1

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:
        """The fastest of the most promising candidates that fit memory."""
        samples = profile.draw(self.profile_samples)

        def candidates(each: Profile) -> Iterator[Candidate]:
            drafts = [*self._drafts(each, samples)]
            if not drafts and not self._is_plain:
                blocks = len(profile.job.model.llm.layers) - 2
                raise UserError(
                    f"strategy.planner.virtual_stages={self.virtual_stages} split={self.split}: the {blocks} blocks of "
                    f"{profile.job.model.llm.name} cannot be spread over the stages of any layout that was asked for"
                )
            return rising_candidates(drafts)

        return fastest_in_trials(profile, candidates, make_program, self.num_trials)

    def _drafts(self, profile: Profile, samples: SampleShapes) -> Iterator[Draft]:
        job = profile.job

        def place(
            least_s: float, degrees: Degrees, layers: Layers, recompute: tuple[bool, ...], leading: bool
        ) -> Candidate:
            layout = place_chain(job, degrees, layers, recompute, leading, self.virtual_stages)
            return Candidate(least_s + profile.step_s(layout), layout)

        for degrees in job.degrees():
            measured = average_layer_s(profile, samples, degrees)
            for recompute in recompute_choices(job):
                costs = [cost * recompute_factor(r) for cost, r in zip(measured, recompute, strict=True)]
                for layers, leading in self._splits(job.model, degrees.pp, costs):
                    stages = _stage_s(job.model, degrees.pp * self.virtual_stages, costs, layers, leading)
                    # Virtual stages fill and drain as much faster as there are of them on a rank.
                    ranks = stages.reshape(self.virtual_stages, degrees.pp).sum(axis=0)
                    ahead, behind = 1 / self.virtual_stages, job.num_microbatches(degrees.dp)
                    least_s = float(ahead * ranks.sum() + (behind - ahead) * ranks.max())
                    yield Draft(least_s, partial(place, least_s, degrees, layers, recompute, leading))

    def _splits(self, model: ModelSpec, pp: int, costs: list[FloatArray]) -> Iterator[tuple[Layers, bool]]:
        """Layers per stage of each module, and whether others than the LLM have stages of their own, by placement.

        Of the generators' stages, only the number with the fastest slowest stage for each number of the encoders'.
        """
        llm = costs[model.llm_index]
        encoders, generators = costs[: model.llm_index], costs[model.llm_index + 1 :]
        if self.placement != "leading_stages" or len(costs) == 1:
            # The encoders ride on the first stage and generators on the last: count them with the LLM's outer layers.
            loaded = llm.copy()
            loaded[0] += sum(float(c.sum()) for c in encoders)
            loaded[-1] += sum(float(c.sum()) for c in generators)
            others = [(len(c),) for c in costs]
            if own := self._llm_split(loaded, pp):
                yield [*others[: model.llm_index], own, *others[model.llm_index + 1 :]], False
        if len(costs) == 1 or self.placement == "first_stage" or not self._is_plain:
            return
        split = cache(lambda module, stages: partition_layers(costs[module], stages))

        def slowest_s(counts: tuple[int, int, int]) -> float:
            stages = _stage_s(model, pp, costs, layers_of(counts), True)
            return float(stages.max())

        def layers_of(counts: tuple[int, int, int]) -> Layers:
            ahead, middle, behind = counts
            each = [ahead] * len(encoders) + [middle] + [behind] * len(generators)
            return [split(module, stages) for module, stages in enumerate(each)]

        most, tail = (range(1, min(map(len, side)) + 1) if side else range(1) for side in (encoders, generators))
        for ahead in most:
            counts = [(ahead, pp - ahead - behind, behind) for behind in tail if 1 <= pp - ahead - behind <= len(llm)]
            if counts:
                yield layers_of(min(counts, key=slowest_s)), True

    def _llm_split(self, layer_s: FloatArray, pp: int) -> tuple[int, ...] | None:
        """LLM layers of each stage of a pipeline of ``pp`` ranks; None if they cannot be split so."""
        stages = pp * self.virtual_stages
        if stages > len(layer_s) or (self.virtual_stages > 1 and pp == 1):
            return None
        if self.split == "balanced":
            return partition_layers(layer_s, stages)
        return None if (len(layer_s) - 2) % stages else spread_blocks(len(layer_s), stages)


@dataclass(frozen=True, slots=True)
class ArrivalOrder:
    """Consecutive samples fill a microbatch; microbatches go round the replicas, as with Megatron's data sampler."""

    handles_generators: ClassVar[bool] = True

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Replica and microbatch from the position in the batch alone."""
        job, dp = profile.job, layout.modules[profile.job.model.llm_index].dp
        microbatch = np.arange(len(shapes)) // job.microbatch_size
        return same_microbatches(job.model, shapes, microbatch % dp, microbatch // dp, microbatch // dp)


def average_layer_s(profile: Profile, samples: SampleShapes, degrees: Degrees) -> list[FloatArray]:
    """Measured forward and backward seconds of every layer on a microbatch of average samples, one array a module."""
    costs = []
    for module in profile.job.model.modules:
        units = module.units(samples)
        each = max(1, round(float(module.lengths(samples, units).mean()))) if len(units) else 0
        count = max(1, round(profile.job.microbatch_size * len(units) / len(samples))) if len(units) else 0
        if not count:
            costs.append(np.zeros(len(module.layers)))
            continue
        times = profile.measure(module, np.full(count, each), degrees.tp, degrees.cp)
        costs.append(np.array([float(t.total_s[0]) for t in times])[module.layer_kind])
    return costs


def _stage_s(model: ModelSpec, pp: int, costs: list[FloatArray], layers: Layers, leading: bool) -> FloatArray:
    """Seconds of a microbatch at each stage of the chain ``[pp]``; ``leading`` as in ``place_chain``."""
    stages = np.zeros(pp)
    firsts = chain_starts(model, pp, layers, leading)
    for first, cost, split in zip(firsts, costs, layers, strict=True):
        stages[first : first + len(split)] += stage_sums(cost, split)
    return stages
