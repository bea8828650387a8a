"""Planners: exhaustive search over the degrees of both modules (arXiv:2605.27678 tunes each variant by hand)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from entrain_bench.arrays import FloatArray
from entrain_bench.errors import UserError, require
from entrain_bench.layout import Layout
from entrain_bench.planning import (
    Candidate,
    fastest_that_fits,
    partition_layers,
    recompute_choices,
    recompute_factor,
    stage_sums,
)
from entrain_bench.profile import Profile
from entrain_bench.shapes import SampleShapes
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.strategy import Compose
from strategies.hetero.degrees import Pair, colocated_pairs, noncolocated_pairs, place_pair
from strategies.hetero.replay import average_layer_s, replay_s


@dataclass(frozen=True, slots=True)
class ColocatedPlanner:
    """Encoder and LLM on all ranks, each with its own TP and DP; the encoder has one stage.

    ``layout.tp``, ``cp``, ``pp`` and ``dp`` bind the LLM.

    Attributes:
        profile_samples: samples averaged into one shape.
        num_simulated: candidates that are replayed on a profiled batch.
    """

    profile_samples: int = 256
    num_simulated: int = 8

    def __post_init__(self) -> None:
        _check_knobs(self.profile_samples, self.num_simulated)

    def plan(self, profile: Profile, compose: Compose) -> Layout:
        """The fastest of the most promising candidates that fit memory."""
        samples = profile.draw(self.profile_samples)
        pairs = colocated_pairs(profile.job)
        candidates = _candidates(profile, samples, pairs, colocated=True)
        return best_replayed(profile, candidates, compose, self.num_simulated)


@dataclass(frozen=True, slots=True)
class NoncolocatedPlanner:
    """An encoder island beside the LLM; together they use all ranks.

    ``layout.tp``, ``cp`` and ``dp`` bind the LLM; ``layout.pp`` counts the stages of both.

    Attributes:
        encoder_ranks: size of the island; None searches parts of a node and whole nodes up to half of the cluster.
        max_encoder_pp: most encoder stages; None sets no limit but the layers.
        profile_samples: samples averaged into one shape.
        num_simulated: candidates that are replayed on a profiled batch.
    """

    encoder_ranks: int | None = None
    max_encoder_pp: int | None = None
    profile_samples: int = 256
    num_simulated: int = 8

    def __post_init__(self) -> None:
        _check_knobs(self.profile_samples, self.num_simulated)
        for name in ("encoder_ranks", "max_encoder_pp"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"strategy.planner.{name}", value, "null or at least 1")

    def plan(self, profile: Profile, compose: Compose) -> Layout:
        """The fastest of the most promising candidates that fit memory."""
        if self.encoder_ranks is not None:
            most = profile.job.cluster.num_ranks - 1
            require(self.encoder_ranks <= most, "strategy.planner.encoder_ranks", self.encoder_ranks, f"at most {most}")
        samples = profile.draw(self.profile_samples)
        pairs = noncolocated_pairs(profile.job, self.encoder_ranks, self.max_encoder_pp)
        candidates = _candidates(profile, samples, pairs, colocated=False)
        return best_replayed(profile, candidates, compose, self.num_simulated)


def best_replayed(profile: Profile, candidates: Iterator[Candidate], compose: Compose, num_simulated: int) -> Layout:
    """Of the ``num_simulated`` best estimates that fit memory, the layout whose replay of one batch is fastest.

    Raises:
        UserError: if no candidate fits.
    """
    ranked = sorted(candidates, key=lambda c: c.estimated_s)
    batch = profile.draw(profile.job.global_batch)
    replayed: list[Candidate] = []
    while ranked and len(replayed) < num_simulated:
        try:
            layout = fastest_that_fits(profile, ranked, compose)
        except UserError:
            if replayed:
                break
            raise
        seconds = replay_s(profile, compose(batch, layout)) + profile.step_s(layout)
        replayed.append(Candidate(seconds, layout))
        ranked = ranked[1 + next(i for i, candidate in enumerate(ranked) if candidate.layout is layout) :]
    if not replayed:
        raise UserError(f"layout: no candidate for model={profile.job.model.name}")
    return min(replayed, key=lambda c: c.estimated_s).layout


def _candidates(profile: Profile, samples: SampleShapes, pairs: list[Pair], *, colocated: bool) -> Iterator[Candidate]:
    """Every pair with every choice of recomputation.

    A module's stages are its own, so its split into stages does not depend on recomputation.
    """
    job = profile.job
    measured: dict[tuple[str, float, int, int], FloatArray] = {}

    def layer_s(module: ModuleSpec, num_samples: float, tp: int, cp: int) -> FloatArray:
        key = (module.name, num_samples, tp, cp)
        if key not in measured:
            measured[key] = average_layer_s(profile, module, samples, num_samples, tp, cp)
        return measured[key]

    for pair in pairs:
        encoder, llm = pair.encoder, pair.llm
        count = job.num_microbatches(llm.dp)
        three_phase = colocated and llm.pp > 1
        # Samples whose items an encoder replica processes at a time.
        share = job.microbatch_size * llm.dp / encoder.dp * (count if three_phase else 1)
        layers, stages = [], []
        for module in job.model.modules:
            degrees, held = (encoder, share) if module.is_encoder else (llm, job.microbatch_size)
            costs = layer_s(module, held, degrees.tp, degrees.cp)
            layers.append(partition_layers(costs, degrees.pp))
            stages.append(stage_sums(costs, layers[-1]))
        plain = place_pair(job, pair, layers, [False] * len(layers), colocated=colocated)
        step = profile.step_s(plain)
        for recompute in recompute_choices(len(layers)):
            scaled = [stage * recompute_factor(again) for stage, again in zip(stages, recompute, strict=True)]
            seconds = estimate_s(np.sum(scaled[:-1], axis=0), scaled[-1], count, colocated=colocated)
            modules = tuple(replace(m, recompute=again) for m, again in zip(plain.modules, recompute, strict=True))
            yield Candidate(seconds + step, replace(plain, modules=modules))


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


def _check_knobs(profile_samples: int, num_simulated: int) -> None:
    require(profile_samples >= 1, "strategy.planner.profile_samples", profile_samples, "at least 1")
    require(num_simulated >= 1, "strategy.planner.num_simulated", num_simulated, "at least 1")
