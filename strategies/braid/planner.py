"""The layout: shapes by the busiest rank, the best of them by their believed schedules, the best of these on trial."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice
from typing import ClassVar

import numpy as np

from entrain_bench.balancing.beliefs import packed_iteration_s
from entrain_bench.balancing.candidates import Candidate, by_estimate
from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.options import check_least
from entrain_bench.balancing.planning import recompute_choices
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.tuning import chosen_layout, default_job
from entrain_bench.balancing.widths import layouts_with_widths
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.errors import IncompatibleError, UserError, require
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes

from .layout import Shape, Work, place, shapes_of, split_layers
from .packs import fastest_packs

# Replicas whose schedules are believed where a layout has more of them.
DRAFT_REPLICAS = 16
# Shapes are considered whose rating is at most so many times the best.
WORST = 1.3
# Layouts with widths are compared on so many drawn batches, and after each dropped if they are so many times as slow as
# the best; no pipelines are planned if the best takes at most so many times its work evenly shared.
BATCHES, NEAR, PIPELINED = 3, 1.05, 1.35


@dataclass(frozen=True, slots=True)
class BraidPlanner:
    """Encoders and LLM on all ranks of a replica.

    Attributes:
        widths: whether a sample may take a group of any width; otherwise all layouts have one TP and CP.
        profile_samples: samples that stand for a batch.
        overhead: share of an encoder chunk's time that a chunk costs anyway, as the planner counts on.
        encoder_degrees: whether encoders have TP and CP of their own.
        spans: numbers of the LLM's blocks that a stage of an encoder may then take besides one.
        encoder_copies: whether a replica may hold several copies of an encoder along its pipeline.
        joint: whether encoder and LLM are split around each other.
        microbatches: multiples of the job's number of microbatches that are considered.
        llm_stages: whether the LLM may have fewer stages than a replica has blocks.
        num_drafts: shapes whose schedule of a profiled batch is believed.
        num_trials: best by that belief that fit memory and run the batch on trial.
    """

    handles_generators: ClassVar[bool] = True

    widths: bool = True
    profile_samples: int = 1024
    overhead: float = 0.05
    encoder_degrees: bool = True
    spans: tuple[int, ...] = (2, 4)
    encoder_copies: bool = True
    joint: bool = True
    microbatches: tuple[float, ...] = (1, 2, 4)
    llm_stages: bool = True
    num_drafts: int = 24
    num_trials: int = 4

    def __post_init__(self) -> None:
        require(0 < self.overhead < 1, "strategy.planner.overhead", self.overhead, "above 0 and below 1")
        check_least(self, "strategy.planner", 1, "profile_samples", "num_drafts", "num_trials")
        wide = [*self.spans]
        require(not wide or min(wide) >= 2, "strategy.planner.spans", wide, "numbers of 2 or more")
        factors = [*self.microbatches]
        require(bool(factors) and min(factors) > 0, "strategy.planner.microbatches", factors, "numbers above 0")

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:
        """The fastest on trial of the most promising layouts that fit memory.

        Pipelines compete only if groups of several widths, where the job allows them, leave ranks idle for long.
        """
        wide, even_s = self._with_widths(profile)
        if wide and decisive(wide[0].estimated_s) <= decisive(PIPELINED * even_s):
            return wide[0].layout
        samples = profile.draw(self.profile_samples)
        batch = profile.draw(profile.job.global_batch)
        draft: MakeProgram = getattr(make_program, "draft", make_program)

        def candidates(each: Profile) -> list[Candidate]:
            return by_estimate(self._candidates(each, Work(each, samples, self.overhead), batch, draft))

        sizes, default = profile.job.free_microbatch_size, default_job(profile.job)
        one_size = replace(self, microbatches=(1,))
        work = Work(profile, samples, self.overhead)

        def quick(each: Profile) -> Iterator[Candidate]:
            later = bool(getattr(draft, "choose_recomputation", False))
            # Where sizes are free, another job has them; the default job is answered as if it were given.
            request = replace(each.job.request, recompute=profile.job.request.recompute)
            planner = one_size if sizes and replace(each.job, request=request) != default else self
            for rating_s, shape in planner.rated(each, work, later):
                layers = split_layers(work, shape).layers
                yield Candidate(rating_s, place(each.job, shape, layers))

        others = [lambda _: wide] if wide else []
        return chosen_layout(profile, candidates, make_program, self.num_trials, others, quick)

    def _with_widths(self, profile: Profile) -> tuple[list[Candidate], float]:
        """Layouts whose groups have several widths, by rising estimate, and seconds of their work evenly shared.

        An estimate is the mean over drawn batches; only layouts near the best of the first batch have more than one.
        """
        start, even_s = profile.place, np.inf
        found = [(list[float](), layout) for layout in layouts_with_widths(profile.job) if has_room(profile, layout)]
        for _ in range(BATCHES if self.widths else 0):
            samples = profile.draw(profile.job.global_batch)
            for seconds, layout in found:
                packs = fastest_packs(samples, layout, profile)
                seconds.append(packs.end_s)
                even_s = min(even_s, packs.even_s)
            best_s = min((float(np.mean(seconds)) for seconds, _ in found), default=np.inf)
            found = [each for each in found if np.mean(each[0]) <= NEAR * best_s < np.inf]
        profile.go_back(start)
        offers = [Candidate(float(np.mean(seconds)), layout) for seconds, layout in found if seconds]
        return sorted(offers, key=lambda each: decisive(each.estimated_s)), even_s

    def _candidates(self, profile: Profile, work: Work, batch: SampleShapes, draft: MakeProgram) -> Iterator[Candidate]:
        """Drafts of the best shapes of every width, of all with the same degrees, then of those next to the fastest."""
        later = bool(getattr(draft, "choose_recomputation", False))
        rated = [shape for _, shape in self.rated(profile, work, later)]
        found: list[tuple[float, Shape]] = []
        tried: set[Shape] = set()

        def attempt(shape: Shape) -> None:
            tried.add(shape)
            seconds = self._drafted_s(profile, work, shape, batch, draft)
            if seconds is not None:
                found.append((seconds, shape))

        # Ratings do not know memory, which widths differ in most.
        widths: set[object] = set()
        for shape in rated if len({shape.width for shape in rated}) > 1 else ():
            if shape.width not in widths and has_room(profile, few_replicas(profile, work, shape)):
                widths.add(shape.width)
                attempt(shape)
        seen: set[object] = {shape.all_degrees for shape in tried}
        for shape in rated:
            if shape.all_degrees not in seen and (not found or len(tried) < self.num_drafts // 2):
                seen.add(shape.all_degrees)
                attempt(shape)
        if not found:
            for shape in islice((shape for shape in rated if shape not in tried), 4 * self.num_drafts):
                attempt(shape)
        while len(tried) < self.num_drafts:
            best_first = [shape for _, shape in sorted(found, key=lambda one: decisive(one[0]))]
            coming = next((other for shape in best_first if (other := neighbour(shape, rated, tried))), None)
            if coming is None:
                break
            attempt(coming)
        if not found:
            raise IncompatibleError(
                f"strategy.planner: model={profile.job.model.name} has no layout with these degrees that fits in memory"
            )
        for seconds, shape in found:
            yield Candidate(seconds, place(profile.job, shape, split_layers(work, shape).layers))

    def rated(self, profile: Profile, work: Work, recompute_later: bool) -> list[tuple[float, Shape]]:
        """All shapes that could be among the best, those with the least busy ranks first, with these seconds."""
        job = profile.job
        choices = recompute_choices(job, chosen_later=recompute_later)
        plain = shapes_of(job, choices, self)
        shapes = [replace(shape, num_microbatches=count) for shape in plain for count in self._counts(profile, shape)]
        least_s = [decisive(work.least_s(shape)) for shape in shapes]
        rated: list[tuple[float, int]] = []
        best_s = np.inf
        for index in np.argsort(least_s, kind="stable").tolist():
            if least_s[index] > WORST * best_s:
                break
            shape = shapes[index]
            rating_s = decisive(max(split_layers(work, shape).busiest_s, work.longest_s(shape)))
            best_s = min(best_s, rating_s)
            rated.append((rating_s, index))
        return [(rating_s, shapes[index]) for rating_s, index in sorted(rated) if rating_s <= WORST * best_s]

    def _counts(self, profile: Profile, shape: Shape) -> list[int]:
        """Numbers of microbatches to consider: a replica has a sample for each."""
        job, dp = profile.job, shape.degrees.dp
        most = job.global_batch // dp
        return sorted({min(most, max(1, round(job.num_microbatches(dp) * factor))) for factor in self.microbatches})

    def _drafted_s(
        self, profile: Profile, work: Work, shape: Shape, batch: SampleShapes, draft: MakeProgram
    ) -> float | None:
        """Believed seconds of the schedule of a shape; None if it does not fit memory."""
        layout = few_replicas(profile, work, shape)
        batch = batch.take(np.arange(len(batch) * layout.modules[profile.job.model.llm_index].dp // shape.degrees.dp))
        if not has_room(profile, layout):
            return None
        try:
            program = draft(batch, layout)
        except UserError:
            return None
        if profile.memory.peak_bytes(program).max() > profile.job.planning_budget_bytes:
            return None
        return packed_iteration_s(program, profile)


def few_replicas(profile: Profile, work: Work, shape: Shape) -> Layout:
    """The layout of a shape, with a few replicas that stand for many; their shares of optimizer states are larger."""
    few = replace(shape, degrees=replace(shape.degrees, dp=min(shape.degrees.dp, DRAFT_REPLICAS)))
    return place(profile.job, few, split_layers(work, shape).layers)


def has_room(profile: Profile, layout: Layout) -> bool:
    """Whether states leave room for anything else."""
    return bool(profile.memory.lane_state_bytes(layout).max() <= profile.job.planning_budget_bytes)


def neighbour(shape: Shape, rated: Sequence[Shape], tried: Set[Shape]) -> Shape | None:
    """The next shape to try of those that differ from one in a single choice; None if there is none.

    Every choice in turn, the one with fewest tried so far; of the others in it the first by rating.
    """
    counts: dict[int, int] = {}
    coming: dict[int, Shape] = {}
    for other in rated:
        choice = shape.differs_in(other)
        if choice is not None:
            counts[choice] = counts.get(choice, 0) + (other in tried)
            if other not in tried:
                coming.setdefault(choice, other)
    if not coming:
        return None
    return coming[min(coming, key=lambda choice: (counts[choice], choice))]
