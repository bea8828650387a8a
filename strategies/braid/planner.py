"""The layout: groups of several widths by believed programs; pipelines by their busiest rank, the best on trial."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from entrain_bench.balancing.beliefs import packed_units_s
from entrain_bench.balancing.candidates import Candidate
from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.options import check_least
from entrain_bench.balancing.planning import recompute_choices
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.tuning import default_job, tuned
from entrain_bench.balancing.widths import layouts_with_widths
from entrain_bench.base.arithmetic import decisive, matmul
from entrain_bench.base.errors import require
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes

from .layout import Shape, Work, place, shapes_of, split_layers
from .packs import fastest_packs

# Shapes are considered whose rating is at most so many times the best.
WORST = 1.3
# Layouts with widths are compared on so many drawn batches: on more if those have fewer samples than the first number,
# on fewer if they have more than the second. From the first number on, a layout is dropped if it takes so many times as
# long as the best; no pipelines are planned if the best takes at most so many times its work evenly shared.
BATCHES, FEW, MANY, NEAR, PIPELINED = 3, 512, 6144, 1.05, 1.5


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
        microbatches: multiples of the job's number of microbatches that are considered.
        llm_stages: whether the LLM may have fewer stages than a replica has blocks.
        num_trials: simulated batches for pipelines with ``tuning=own``, whose tuner is that of ``tuning=equal``.
    """

    handles_generators: ClassVar[bool] = True

    widths: bool = True
    profile_samples: int = 1024
    overhead: float = 0.05
    encoder_degrees: bool = True
    spans: tuple[int, ...] = (2, 4)
    encoder_copies: bool = True
    microbatches: tuple[float, ...] = (1, 2, 4)
    llm_stages: bool = True
    num_trials: int = 48

    def __post_init__(self) -> None:
        require(0 < self.overhead < 1, "strategy.planner.overhead", self.overhead, "above 0 and below 1")
        check_least(self, "strategy.planner", 1, "profile_samples", "num_trials")
        wide = [*self.spans]
        require(not wide or min(wide) >= 2, "strategy.planner.spans", wide, "numbers of 2 or more")
        factors = [*self.microbatches]
        require(bool(factors) and min(factors) > 0, "strategy.planner.microbatches", factors, "numbers above 0")

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:
        """Groups of the widths that end first by belief, or the layout that the tuner finds.

        Pipelines compete only if groups of several widths, where the job allows them, leave ranks idle for long.
        """
        wide, even_s = self._with_widths(profile)
        if wide and decisive(wide[0].estimated_s) <= decisive(PIPELINED * even_s):
            return wide[0].layout
        draft: MakeProgram = getattr(make_program, "draft", make_program)
        sizes, default = profile.job.free_microbatch_size, default_job(profile.job)
        one_size = replace(self, microbatches=(1,))
        work = Work(profile, profile.draw(self.profile_samples), self.overhead)

        def candidates(each: Profile) -> Iterator[Candidate]:
            later = bool(getattr(draft, "choose_recomputation", False))
            # Where sizes are free, another job has them; the default job is answered as if it were given.
            request = replace(each.job.request, recompute=profile.job.request.recompute)
            planner = one_size if sizes and replace(each.job, request=request) != default else self
            for rating_s, shape in planner.rated(each, work, later):
                yield Candidate(rating_s, place(each.job, shape, split_layers(work, shape).layers))

        budget = self.num_trials if profile.tuning_budget is None else profile.tuning_budget
        return tuned(profile, (candidates, *([lambda _: wide] if wide else [])), make_program, budget)

    def _with_widths(self, profile: Profile) -> tuple[list[Candidate], float]:
        """Layouts whose groups have several widths, by rising estimate, and seconds of their work evenly shared.

        An estimate is the mean over drawn batches; only layouts near the best have more than a few.
        """
        start, size, offers = profile.place, profile.job.global_batch, list[Candidate]()
        count = min(max(BATCHES, FEW // size), max(1, MANY // size)) if self.widths else 0
        batches = [profile.draw(size) for _ in range(count)]
        profile.go_back(start)
        best = np.full(count, np.inf)
        for layout in layouts_with_widths(profile.job) if count else ():
            # No round is shorter than its gathers.
            if not has_room(profile, layout) or gathers_s(profile, layout) > NEAR * best.mean():
                continue
            seconds = np.zeros(0)
            for samples in batches:
                seconds = np.append(seconds, fastest_packs(samples, layout, profile)[0])
                is_near = seconds.mean() <= NEAR * best[: len(seconds)].mean()
                if np.isinf(seconds[-1]) or (len(seconds) * size >= FEW and not is_near):
                    break
            else:
                offers.append(Candidate(float(seconds.mean()), layout))
                best = min(best, seconds, key=np.mean)
        even_s = min((evenly_s(samples, profile) for samples in batches), default=np.inf)
        return sorted(offers, key=lambda each: decisive(each.estimated_s)), even_s

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
            found = split_layers(work, shape)
            step_s = profile.step_s(place(job, shape, found.layers))
            rating_s = decisive(max(found.busiest_s, work.longest_s(shape)) + step_s)
            best_s = min(best_s, rating_s)
            rated.append((rating_s, index))
        return [(rating_s, shapes[index]) for rating_s, index in sorted(rated) if rating_s <= WORST * best_s]

    def _counts(self, profile: Profile, shape: Shape) -> list[int]:
        """Numbers of microbatches to consider: a replica has a sample for each."""
        job, dp = profile.job, shape.degrees.dp
        most = job.global_batch // dp
        return sorted({min(most, max(1, round(job.num_microbatches(dp) * factor))) for factor in self.microbatches})


def evenly_s(samples: SampleShapes, profile: Profile) -> float:
    """Believed seconds of a batch if all ranks shared its work evenly, at the rate of whole layers on a rank."""
    work_s = 0.0
    for module in profile.job.model.modules:
        added = packed_units_s(module, samples, 1, 1, profile).sum(axis=(0, 1))
        work_s += float(matmul(added, np.bincount(module.layer_kind, minlength=len(module.kinds))))
    return work_s / profile.job.cluster.num_ranks


def gathers_s(profile: Profile, layout: Layout) -> float:
    """Seconds that a round's gathers and scatters of sharded weights take; 0 if they are not sharded."""
    pairs = [pair for pair in zip(profile.job.model.modules, layout.modules, strict=True) if pair[1].sharded]
    traffic = [profile.layer_traffic(*pair) for pair in pairs]
    return float(sum((own.gather_s + own.again_s + own.scatter_s).sum() for own in traffic))


def has_room(profile: Profile, layout: Layout) -> bool:
    """Whether states leave room for anything else."""
    return bool(profile.memory.lane_state_bytes(layout).max() <= profile.job.planning_budget_bytes)
