"""The layout: shapes by the busiest rank, the best of them by their believed schedules, the best of these on trial."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from entrain_bench.arithmetic import decisive
from entrain_bench.errors import IncompatibleError, UserError, require
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.strategy.beliefs import packed_iteration_s
from entrain_bench.strategy.candidates import Candidate, by_estimate, fastest_in_trials
from entrain_bench.strategy.interface import MakeProgram
from entrain_bench.strategy.planning import recompute_choices
from entrain_bench.strategy.profile import Profile

from .layout import Shape, place, shapes_of, split_layers

# Replicas whose schedules are believed where a layout has more of them.
DRAFT_REPLICAS = 16


@dataclass(frozen=True, slots=True)
class BraidPlanner:
    """Encoders and LLM on all ranks of a replica.

    Attributes:
        profile_samples: samples that stand for a batch.
        encoder_tokens: tokens of an encoder chunk that the planner counts on.
        encoder_degrees: whether encoders have TP and CP of their own.
        encoder_copies: whether a replica may hold several copies of an encoder along its pipeline.
        joint: whether encoder and LLM are split around each other.
        microbatches: multiples of the job's number of microbatches that are considered.
        num_drafts: shapes whose schedule of a profiled batch is believed, and half as many variants of the best.
        num_trials: best by that belief that fit memory and run the batch on trial.
    """

    profile_samples: int = 1024
    encoder_tokens: int = 4096
    encoder_degrees: bool = True
    encoder_copies: bool = True
    joint: bool = True
    microbatches: tuple[float, ...] = (1, 2, 4)
    num_drafts: int = 16
    num_trials: int = 4

    def __post_init__(self) -> None:
        for name in ("profile_samples", "encoder_tokens", "num_drafts", "num_trials"):
            require(getattr(self, name) >= 1, f"strategy.planner.{name}", getattr(self, name), "at least 1")
        factors = [*self.microbatches]
        require(bool(factors) and min(factors) > 0, "strategy.planner.microbatches", factors, "numbers above 0")

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:
        """The fastest on trial of the most promising layouts that fit memory."""
        samples = profile.draw(self.profile_samples)
        batch = profile.draw(profile.job.global_batch)
        draft: MakeProgram = getattr(make_program, "draft", make_program)

        def candidates(each: Profile) -> list[Candidate]:
            return by_estimate(self._candidates(each, samples, batch, draft))

        return fastest_in_trials(profile, candidates, make_program, self.num_trials)

    def _candidates(
        self, profile: Profile, samples: SampleShapes, batch: SampleShapes, draft: MakeProgram
    ) -> Iterator[Candidate]:
        """The shapes with the least busy ranks, and the best of these with other numbers of microbatches."""
        found: list[tuple[float, Shape]] = []
        later = bool(getattr(draft, "choose_recomputation", False))
        first = sorted(self._ranked(profile, samples, later), key=lambda one: one[0])
        for _, shape in islice(first, self.num_drafts):
            found += self._drafted(profile, samples, shape, batch, draft)
        if not found:
            raise IncompatibleError(
                f"strategy.planner: model={profile.job.model.name} has no layout that fits memory with a layer of the "
                "LLM on every block"
            )
        found.sort(key=lambda one: decisive(one[0]))
        others = [
            replace(shape, num_microbatches=count)
            for _, shape in found
            for count in self._counts(profile, shape)
            if count != shape.num_microbatches
        ]
        for shape in others[: -(-self.num_drafts // 2)]:
            found += self._drafted(profile, samples, shape, batch, draft)
        for seconds, shape in found:
            yield Candidate(seconds, self._layout(profile, samples, shape))

    def _ranked(self, profile: Profile, samples: SampleShapes, recompute_later: bool) -> Iterator[tuple[float, Shape]]:
        choices = recompute_choices(profile.job, chosen_later=recompute_later)
        for shape in shapes_of(profile.job, choices, self.encoder_degrees, self.joint, self.encoder_copies):
            yield decisive(split_layers(profile, samples, shape, self.encoder_tokens).busiest_s), shape

    def _counts(self, profile: Profile, shape: Shape) -> list[int]:
        """Numbers of microbatches to consider: a replica has a sample for each."""
        job, dp = profile.job, shape.degrees.dp
        most = job.global_batch // dp
        return sorted({min(most, max(1, round(job.num_microbatches(dp) * factor))) for factor in self.microbatches})

    def _layout(self, profile: Profile, samples: SampleShapes, shape: Shape) -> Layout:
        return place(profile.job, shape, split_layers(profile, samples, shape, self.encoder_tokens).layers)

    def _drafted(
        self, profile: Profile, samples: SampleShapes, shape: Shape, batch: SampleShapes, draft: MakeProgram
    ) -> list[tuple[float, Shape]]:
        """The shape with the believed seconds of its schedule, if that fits memory."""
        # Of many replicas a few stand for all; their shares of optimizer states are a little larger.
        dp = shape.degrees.dp
        few = replace(shape, degrees=replace(shape.degrees, dp=min(dp, DRAFT_REPLICAS)))
        layers = split_layers(profile, samples, shape, self.encoder_tokens).layers
        layout = place(profile.job, few, layers)
        batch = batch.take(np.arange(len(batch) * few.degrees.dp // dp))
        if profile.memory.lane_state_bytes(layout).max() > profile.job.planning_budget_bytes:
            return []
        try:
            program = draft(batch, layout)
        except UserError:
            return []
        if profile.memory.peak_bytes(program).max() > profile.job.planning_budget_bytes:
            return []
        return [(packed_iteration_s(program, profile), shape)]
