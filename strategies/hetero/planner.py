"""Planners: exhaustive search over the degrees of both modules (arXiv:2605.27678 tunes each variant by hand)."""

from __future__ import annotations

from dataclasses import dataclass

from entrain_bench.balancing.candidates import Candidate, by_estimate, fastest_in_trials
from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.errors import require
from entrain_bench.program.layout import Layout

from .degrees import colocated_pairs, noncolocated_pairs
from .estimates import candidates_of


@dataclass(frozen=True, slots=True)
class ColocatedPlanner:
    """Encoder and LLM on all ranks, each with its own TP and DP; the encoder has one stage.

    ``layout.tp``, ``cp``, ``pp`` and ``dp`` bind the LLM.

    Attributes:
        encoder_tp: TP of the encoders; None searches it.
        offload_encoder: whether layouts are considered, too, whose encoder weights and gradients are in host memory
            while the LLM runs (three-phase schedules only).
        profile_samples: samples averaged into one shape.
        num_trials: best estimates that fit memory and run a profiled batch on trial.
    """

    encoder_tp: int | None = None
    offload_encoder: bool = False
    profile_samples: int = 256
    num_trials: int = 8

    def __post_init__(self) -> None:
        _check_knobs(self.profile_samples, self.num_trials)

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:
        """The fastest of the most promising candidates that fit memory."""
        samples = profile.draw(self.profile_samples)

        def candidates(each: Profile) -> list[Candidate]:
            pairs = colocated_pairs(each.job, self.encoder_tp)
            return by_estimate(candidates_of(each, samples, pairs, colocated=True, offload=self.offload_encoder))

        return fastest_in_trials(profile, candidates, make_program, self.num_trials)


@dataclass(frozen=True, slots=True)
class NoncolocatedPlanner:
    """An encoder island beside the LLM; together they use all ranks.

    ``layout.tp``, ``cp`` and ``dp`` bind the LLM; ``layout.pp`` counts the stages of both.

    Attributes:
        encoder_ranks: size of the island; None searches parts of a node and whole nodes up to half of the cluster.
        max_encoder_pp: most encoder stages; None sets no limit but the layers.
        encoder_tp: TP of the encoders; None searches it.
        profile_samples: samples averaged into one shape.
        num_trials: best estimates that fit memory and run a profiled batch on trial.
    """

    encoder_ranks: int | None = None
    max_encoder_pp: int | None = None
    encoder_tp: int | None = None
    profile_samples: int = 256
    num_trials: int = 8

    def __post_init__(self) -> None:
        _check_knobs(self.profile_samples, self.num_trials)
        for name in ("encoder_ranks", "max_encoder_pp"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"strategy.planner.{name}", value, "null or at least 1")

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:
        """The fastest of the most promising candidates that fit memory."""
        if self.encoder_ranks is not None:
            most = profile.job.cluster.num_ranks - 1
            require(self.encoder_ranks <= most, "strategy.planner.encoder_ranks", self.encoder_ranks, f"at most {most}")
        samples = profile.draw(self.profile_samples)

        def candidates(each: Profile) -> list[Candidate]:
            pairs = noncolocated_pairs(each.job, self.encoder_ranks, self.max_encoder_pp, self.encoder_tp)
            return by_estimate(candidates_of(each, samples, pairs, colocated=False))

        return fastest_in_trials(profile, candidates, make_program, self.num_trials)


def _check_knobs(profile_samples: int, num_trials: int) -> None:
    require(profile_samples >= 1, "strategy.planner.profile_samples", profile_samples, "at least 1")
    require(num_trials >= 1, "strategy.planner.num_trials", num_trials, "at least 1")
