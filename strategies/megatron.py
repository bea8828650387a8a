"""A Megatron-LM style baseline: homogeneous layout, samples in arrival order, 1F1B.

The encoder uses the LLM's TP, CP and DP. Both placements that frameworks offer are considered: on the first LLM stage,
or on leading stages of its own. Everything is decided from the average sample shape; what a batch contains is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from entrain_bench.arrays import FloatArray
from entrain_bench.assignment import Assignment, same_microbatches
from entrain_bench.errors import require, unknown_choice
from entrain_bench.job import Degrees
from entrain_bench.layout import Layout
from entrain_bench.planning import (
    Candidate,
    fastest_in_trials,
    partition_layers,
    place_chain,
    recompute_choices,
    recompute_factor,
    stage_sums,
)
from entrain_bench.profile import Profile
from entrain_bench.shapes import SampleShapes
from entrain_bench.strategy import Compose

PLACEMENTS = ("auto", "first_stage", "leading_stages")


@dataclass(frozen=True, slots=True)
class MegatronPlanner:
    """Picks degrees, placement and layers per stage by the 1F1B time of an average shape, then by trial runs.

    Attributes:
        placement: ``first_stage``, ``leading_stages``, or ``auto`` for either.
        profile_samples: samples averaged into one shape.
        num_trials: best estimates that fit memory and run a profiled batch on trial.
    """

    placement: str = "auto"
    profile_samples: int = 256
    num_trials: int = 8

    def __post_init__(self) -> None:
        if self.placement not in PLACEMENTS:
            raise unknown_choice("strategy.planner.placement", self.placement, PLACEMENTS)
        require(self.profile_samples >= 1, "strategy.planner.profile_samples", self.profile_samples, "at least 1")
        require(self.num_trials >= 1, "strategy.planner.num_trials", self.num_trials, "at least 1")

    def plan(self, profile: Profile, compose: Compose) -> Layout:
        """The fastest of the most promising candidates that fit memory."""
        samples = profile.draw(self.profile_samples)
        return fastest_in_trials(profile, self._candidates(profile, samples), compose, self.num_trials)

    def _candidates(self, profile: Profile, samples: SampleShapes) -> Iterator[Candidate]:
        job = profile.job
        for degrees in job.degrees():
            measured = average_layer_s(profile, samples, degrees)
            for recompute in recompute_choices(len(measured)):
                costs = [cost * recompute_factor(r) for cost, r in zip(measured, recompute, strict=True)]
                for layers, leading in self._splits(degrees.pp, costs):
                    seconds = _estimate_s(job.num_microbatches(degrees.dp), degrees.pp, costs, layers, leading)
                    layout = place_chain(job, degrees, layers, recompute, leading)
                    yield Candidate(seconds + profile.step_s(layout), layout)

    def _splits(self, pp: int, costs: list[FloatArray]) -> Iterator[tuple[list[tuple[int, ...]], bool]]:
        """Layers per stage of each module, and whether encoders lead, for every allowed placement."""
        *encoders, llm = costs
        if pp <= len(llm) and (self.placement != "leading_stages" or not encoders):
            # The encoders ride on the first stage: count them with the LLM's first layer.
            loaded = llm.copy()
            loaded[0] += sum(float(c.sum()) for c in encoders)
            yield [*((len(c),) for c in encoders), partition_layers(loaded, pp)], False
        if encoders and self.placement != "first_stage":
            most = min([pp - 1, *map(len, encoders)])
            for stages in range(max(1, pp - len(llm)), most + 1):
                yield [*(partition_layers(c, stages) for c in encoders), partition_layers(llm, pp - stages)], True


@dataclass(frozen=True, slots=True)
class ArrivalOrder:
    """Consecutive samples fill a microbatch; microbatches go round the replicas, as with Megatron's data sampler."""

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Replica and microbatch from the position in the batch alone."""
        job, dp = profile.job, layout.modules[-1].dp
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


def _estimate_s(
    num_microbatches: int, pp: int, costs: list[FloatArray], layers: list[tuple[int, ...]], leading: bool
) -> float:
    """1F1B time of uniform microbatches: fill and drain, and the slowest stage for the rest."""
    stages = np.zeros(pp)
    for index, (cost, split) in enumerate(zip(costs, layers, strict=True)):
        first = pp - len(split) if leading and index == len(costs) - 1 else 0
        stages[first : first + len(split)] += stage_sums(cost, split)
    return float(stages.sum() + (num_microbatches - 1) * stages.max())
