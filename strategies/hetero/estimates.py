"""Estimates of a layout from an average shape: uniform microbatches, closed forms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from math import ceil

import numpy as np

from entrain_bench.balancing.candidates import Candidate
from entrain_bench.balancing.planning import partition_layers, recompute_choices, recompute_factor, stage_sums
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arrays import FloatArray
from entrain_bench.specs.job import Degrees, Job
from entrain_bench.specs.layer import BF16_BYTES
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.shapes import SampleShapes

from .degrees import Pair, place_pair


def candidates_of(
    profile: Profile, samples: SampleShapes, pairs: list[Pair], *, colocated: bool, offload: bool = False
) -> Iterator[Candidate]:
    """Every pair with every choice of recomputation.

    A module's stages are its own, so its split into stages does not depend on recomputation.

    Args:
        profile: measurements.
        samples: samples averaged into one shape.
        pairs: degrees of encoders and LLM.
        colocated: whether the modules share their ranks.
        offload: whether to consider three-phase schedules with and without encoder offload.
    """
    job = profile.job

    @cache
    def split(index: int, num_samples: float, degrees: Degrees) -> tuple[tuple[int, ...], FloatArray]:
        module = job.model.modules[index]
        costs = average_layer_s(profile, module, samples, num_samples, degrees.tp, degrees.cp)
        layers = partition_layers(costs, degrees.pp)
        return layers, stage_sums(costs, layers)

    for pair in pairs:
        encoder, llm = pair.encoder, pair.llm
        count = job.num_microbatches(llm.dp)
        three_phase = colocated and llm.pp > 1
        # Samples whose items an encoder replica processes at a time.
        share = job.microbatch_size * llm.dp / encoder.dp * (count if three_phase else 1)
        splits = [
            split(index, share, encoder) if module.is_encoder else split(index, job.microbatch_size, llm)
            for index, module in enumerate(job.model.modules)
        ]
        none = [False] * len(splits)
        plain = place_pair(job, pair, [layers for layers, _ in splits], none, colocated=colocated)
        step = profile.step_s(plain)
        choices = product(recompute_choices(job), [False, True] if three_phase and offload else [False])
        for recompute, away in choices:
            scaled = [stage * recompute_factor(again) for (_, stage), again in zip(splits, recompute, strict=True)]
            seconds = estimate_s(np.sum(scaled[:-1], axis=0), scaled[-1], count, colocated=colocated)
            modules = tuple(
                replace(placed, recompute=again, offload=away and module.is_encoder)
                for module, placed, again in zip(job.model.modules, plain.modules, recompute, strict=True)
            )
            transfers = offload_s(job, encoder.tp) if away else 0.0
            yield Candidate(seconds + step + transfers, replace(plain, modules=modules))


def offload_s(job: Job, tp: int) -> float:
    """Time in which the encoders' bf16 weights leave a rank and come back over the host link."""
    parameters = sum(module.parameters for module in job.model.encoders) / tp
    return 2 * BF16_BYTES * parameters / job.cluster.device.host_bandwidth_bytes_per_s


def estimate_s(encoder: FloatArray, llm: FloatArray, num_microbatches: int, *, colocated: bool) -> float:
    """Time of uniform microbatches, without the step at the end of the iteration.

    Args:
        encoder: forward and backward seconds of each encoder stage; for three phases of the whole window.
        llm: forward and backward seconds of each LLM stage for a microbatch.
        num_microbatches: LLM microbatches of a replica.
        colocated: whether the modules share their ranks.
    """
    if not colocated:
        chain = np.concatenate([encoder, llm])
        return float(chain.sum() + (num_microbatches - 1) * chain.max())
    if len(llm) > 1:
        return float(encoder.sum() + llm.sum() + (num_microbatches - 1) * llm.max())
    return float(num_microbatches * (encoder.sum() + llm.sum()))


def average_layer_s(
    profile: Profile, module: ModuleSpec, samples: SampleShapes, num_samples: float, tp: int, cp: int
) -> FloatArray:
    """Measured forward and backward seconds of each layer on a chunk of average units ``[layers]``.

    Args:
        profile: measurements.
        module: the module.
        samples: samples averaged into one shape.
        num_samples: samples whose units the chunk holds; may be a fraction, units are rounded up as in the fullest
            of several slices.
        tp: tensor-parallel degree.
        cp: context-parallel degree.
    """
    units = module.units(samples)
    if not len(units):
        return np.zeros(len(module.layers))
    each = max(1, round(float(module.lengths(samples, units).mean())))
    count = max(1, ceil(num_samples * len(units) / len(samples) - 1e-9))
    times = profile.measure(module, np.full(count, each), tp, cp)
    return np.array([float(t.total_s[0]) for t in times])[module.layer_kind]
