"""The static layout that a job could have, with one plane of ranks for DP and CP together; degrees by trial runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from entrain_bench.balancing.beliefs import packed_iteration_s
from entrain_bench.balancing.candidates import Candidate, by_estimate
from entrain_bench.balancing.halving import content_of
from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.options import check_least
from entrain_bench.balancing.planning import average_layer_s, recompute_choices, recompute_factor
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.rounds import even_layers, plane_layout
from entrain_bench.balancing.tuning import chosen_layout
from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import UserError
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes


@dataclass(frozen=True, slots=True)
class PlanePlanner:
    """TP and PP as in a static layout, DP x CP as one plane, and as many rounds as that layout has microbatches.

    So CP and microbatch size of the static layout are what walks the tokens that a rank may hold in a round.

    Attributes:
        profile_samples: samples averaged into one shape, to split layers over stages.
        num_trials: best estimates that fit memory and run a profiled batch on trial.
    """

    handles_generators: ClassVar[bool] = True

    profile_samples: int = 256
    num_trials: int = 8

    def __post_init__(self) -> None:
        check_least(self, "strategy.planner", 1, "profile_samples", "num_trials")

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:
        """The fastest of the most promising candidates that fit memory.

        Raises:
            UserError: if there is none; says why.
        """
        samples, batch = profile.draw(self.profile_samples), profile.draw(profile.job.global_batch)
        draft: MakeProgram = getattr(make_program, "draft", make_program)
        later = bool(getattr(make_program, "choose_recomputation", False))
        known = Known(samples, batch, draft)
        return chosen_layout(
            profile, lambda each: by_estimate(candidates(each, known, later)), make_program, self.num_trials
        )


@dataclass(frozen=True, slots=True)
class Known:
    """Layer times and estimates that were computed for earlier TP, PP and rounds.

    Attributes:
        samples: averaged into one shape.
        batch: what programs are estimated on.
        make_program: the strategy's programs.
    """

    samples: SampleShapes
    batch: SampleShapes
    make_program: MakeProgram
    layer_s: dict[int, list[FloatArray]] = field(default_factory=dict)
    estimates: dict[tuple[object, ...], float] = field(default_factory=dict)

    def layers(self, profile: Profile, tp: int) -> list[FloatArray]:
        """Seconds of every layer of each module for an average sample at a TP."""
        if tp not in self.layer_s:
            one = profile.for_job(profile.job.with_microbatch_size(1))
            self.layer_s[tp] = average_layer_s(one, self.samples, tp, 1)
        return self.layer_s[tp]

    def estimated(self, profile: Profile, layout: Layout) -> float:
        """Believed seconds of the batch's program."""
        key = content_of(layout)
        if key not in self.estimates:
            self.estimates[key] = packed_iteration_s(self.make_program(self.batch, layout), profile)
        return self.estimates[key]


def candidates(profile: Profile, known: Known, chosen_later: bool) -> Iterator[Candidate]:
    """Every TP, PP and number of rounds of a job, with every choice of recomputation.

    Raises:
        UserError: why there is none.
    """
    job, none = profile.job, (False,) * len(profile.job.model.modules)
    seen: set[tuple[int, int, int]] = set()
    problem: UserError | None = None
    found = False
    for degrees in job.degrees():
        rounds = job.num_microbatches(degrees.dp)
        key = degrees.tp, degrees.pp, rounds
        if key in seen:
            continue
        seen.add(key)
        layer_s = known.layers(profile, degrees.tp)
        module_s = np.array([float(own.sum()) for own in layer_s])
        for layers, leading in even_layers(job.model, layer_s, degrees.pp):
            try:
                plain = plane_layout(job, degrees.tp, layers, leading, none, rounds)
                seconds = known.estimated(profile, plain)
            except UserError as error:
                problem = problem or error.with_traceback(None)
                continue
            for recompute in recompute_choices(job, chosen_later=chosen_later):
                slower = float((module_s * [recompute_factor(again) for again in recompute]).sum() / module_s.sum())
                layout = plane_layout(job, degrees.tp, layers, leading, recompute, rounds)
                found = True
                yield Candidate(seconds * slower, layout)
    if problem is not None and not found:
        raise problem
