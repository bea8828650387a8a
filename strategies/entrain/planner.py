"""Entrain's planner and schedule.

How many samples to profile (Algorithm 1), and the static layout (Algorithm 2); 1F1B with split encoder backwards and
eager forwards (section 5.3).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import ClassVar

import numpy as np

from entrain_bench.balancing.candidates import Candidate, by_estimate
from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.options import Eager
from entrain_bench.balancing.planning import (
    allocate_stages,
    partition_layers,
    place_chain,
    recompute_choices,
    recompute_factor,
    stable_samples,
    stage_sums,
)
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.schedules import OneForwardOneBackward
from entrain_bench.balancing.tuning import chosen_layout, default_job
from entrain_bench.base.arithmetic import log
from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import UserError
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.job import Degrees
from entrain_bench.specs.parse import Count
from entrain_bench.specs.shapes import SampleShapes

logger = logging.getLogger(__name__)

# Algorithm 1: alpha, the probability of accepting an unstable number of samples; the tolerated probability that a fresh
# batch allocates differently; and where it gives up (a ratio on a rounding boundary converges arbitrarily late).
CONFIDENCE_ERROR = 0.05
ALLOCATION_ERROR = 0.05
MAX_SAMPLES = 16384
# Validation batches that must all agree (k of Algorithm 1).
NUM_VALIDATIONS = ceil(log(CONFIDENCE_ERROR) / log(1 - ALLOCATION_ERROR))


@dataclass(frozen=True, slots=True)
class EntrainPlanner:
    """Searches homogeneous TP and CP, and the pipeline stages of encoder and LLM from the profiled workload ratio.

    Attributes:
        profile_samples: samples to profile; None runs Algorithm 1 for the smallest stable number.
        encoder_stages: stages of the encoder; None splits a replica's stages by the profiled workload ratio.
        num_trials: best estimates that fit memory and run a profiled batch on trial; the paper's planner runs none (1).
    """

    profile_samples: Count | None = None
    encoder_stages: Count | None = None
    num_trials: Count = 1

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:
        """The layout with the highest estimated throughput among those that fit memory (Algorithm 2)."""
        usable = [
            degrees
            for degrees in profile.job.degrees()
            if degrees.pp > (self.encoder_stages or 1) or not profile.job.model.encoders
        ]
        if not usable and self.encoder_stages:
            needed = "must be below layout.pp, because the LLM needs a stage"
            raise UserError(f"strategy.planner.encoder_stages={self.encoder_stages}: {needed}")
        if not usable:
            raise UserError("layout.pp=1: must be at least 2: one stage for the encoders and one for the LLM")
        if profile.tuning_budget is None:
            stable = {degrees: self._num_samples(profile, degrees) for degrees in usable}
            draw = profile.samples.draw
        else:
            # All fixed jobs share the samples that are stable for the first.
            default = default_job(profile.job)
            first = next((one for one in (default.degrees() if default else ()) if one in usable), usable[0])
            stable = dict.fromkeys(usable, self._num_samples(profile, first))
            draw = cache(profile.samples.draw)

        def candidates(sized: Profile) -> list[Candidate]:
            return by_estimate(self._candidates(sized, stable, draw))

        layout = chosen_layout(profile, candidates, make_program, self.num_trials)
        llm = layout.modules[-1]
        num_samples = next(n for d, n in stable.items() if (d.tp, d.cp, d.dp) == (llm.tp, llm.cp, llm.dp))
        if num_samples > profile.job.global_batch:
            logger.warning(
                "global_batch=%d is below the stable profiling batch of %d: some batches would want another layout",
                profile.job.global_batch,
                num_samples,
            )
        return layout

    def _num_samples(self, profile: Profile, degrees: Degrees) -> int:
        """Algorithm 1: the smallest doubling of the batch whose allocation 59 fresh batches repeat."""
        if self.profile_samples:
            return self.profile_samples
        num_samples, stable = stable_samples(profile, degrees, NUM_VALIDATIONS, MAX_SAMPLES)
        if not stable:
            logger.warning("allocation still varies at %d samples; planning with those", num_samples)
        return num_samples

    def _candidates(
        self, profile: Profile, stable: Mapping[Degrees, int], draw: Callable[[int], SampleShapes]
    ) -> Iterator[Candidate]:
        for degrees in profile.job.degrees():
            if degrees not in stable:
                continue
            samples = draw(stable[degrees])
            if self.encoder_stages is None or not profile.job.model.encoders:
                stages = allocate_stages(profile, samples, degrees)
            else:
                stages = self.encoder_stages, degrees.pp - self.encoder_stages
            for recompute in recompute_choices(profile.job):
                seconds, layers = _estimate(profile, samples, degrees, stages, recompute)
                layout = place_chain(profile.job, degrees, layers, recompute, leading=True)
                yield Candidate(seconds, layout)


def _estimate(
    profile: Profile, samples: SampleShapes, degrees: Degrees, stages: tuple[int, ...], recompute: tuple[bool, ...]
) -> tuple[float, list[tuple[int, ...]]]:
    """Estimated iteration time of a topology, and each module's layers per stage (both tiers of Algorithm 2)."""
    job = profile.job
    layers = []
    latencies = []
    for module, again in zip(job.model.modules, recompute, strict=True):
        count = stages[0] if module.is_encoder else stages[-1]
        costs = _mean_layer_s(profile, samples, module.name, degrees) * job.microbatch_size * recompute_factor(again)
        # Two thirds of a layer's time are its backward's.
        costs = costs * np.array([(1.0 + 2.0 * layer.backward_share) / 3.0 for layer in module.layers])
        split = partition_layers(costs, count)
        layers.append(split)
        latencies.append(stage_sums(costs, split))
    encoder = np.sum(latencies[:-1], axis=0) if len(latencies) > 1 else np.zeros(0)
    chain = np.concatenate([encoder, latencies[-1]])
    # TP and CP are the same on both sides of the boundary, so nothing is resharded (P_reshard = 0).
    return float(chain.sum() + (job.num_microbatches(degrees.dp) - 1) * chain.max()), layers


def _mean_layer_s(profile: Profile, samples: SampleShapes, name: str, degrees: Degrees) -> FloatArray:
    """Estimated forward seconds a sample spends in each layer, on average ``[layers]``."""
    module = profile.job.model.module(name)
    lengths = module.lengths(samples, module.units(samples)).astype(np.float64)
    fit = profile.layers.forward_fit(module, degrees.tp, degrees.cp)
    per_kind = np.maximum(np.polynomial.polynomial.polyval(lengths, fit.T[::-1]), 0.0).sum(axis=-1) / len(samples)
    return np.asarray(per_kind[module.layer_kind])


@dataclass(frozen=True, slots=True)
class EntrainScheduler(OneForwardOneBackward):
    """1F1B in which deferred samples run backward with the LLM microbatch that took them.

    Encoder stages warm up with as many forwards as memory allows.

    Attributes:
        split_backward: whether an encoder microbatch's backward is cut; else it waits for its last deferred sample.
    """

    handles_generators: ClassVar[bool] = False
    eager: Eager = "encoder"
    split_backward: bool = True

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """The program; warm-up grows with free memory, one stage at least one forward ahead of the next."""
        return self.in_chain(shapes, layout, assignment, profile, self.split_backward)
