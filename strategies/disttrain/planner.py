"""DistTrain's planner: TP of every group and DP of the backbone enumerated, GPUs solved for, then rounded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count, islice
from typing import ClassVar

import numpy as np

from entrain_bench.balancing.candidates import Candidate
from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.options import check_least
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.tuning import chosen_layout
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.errors import UserError
from entrain_bench.program.layout import Layout
from entrain_bench.specs.job import LayoutRequest
from entrain_bench.specs.shapes import SampleShapes

from .orchestration import Point
from .orchestrations import Orchestration, SubProblem

type Solution = tuple[SubProblem, Point]
# Draws until the profiled samples exercise every module; a lone sample may have no items.
MAX_DRAWS = 64


@dataclass(frozen=True, slots=True)
class DistTrainPlanner:
    """Gives encoder, LLM and generator GPUs and parallelism of their own by the time of a few profiled samples.

    Attributes:
        profile_samples: samples behind the cost functions C_u; one, as Entrain's paper says of DistTrain.
        requests_bind_encoder: whether requested TP, CP and DP hold for encoder and generator as for the LLM.
        count_step: whether candidates are compared with gradient synchronisation and optimizer included.
        rounded: integer solutions kept of each sub-problem, should the best not fit memory.
        num_trials: best estimates that fit memory and run a profiled batch on trial; the paper's planner runs none (1).
    """

    handles_generators: ClassVar[bool] = True

    profile_samples: int = 1
    requests_bind_encoder: bool = True
    count_step: bool = True
    rounded: int = 3
    num_trials: int = 1

    def __post_init__(self) -> None:
        check_least(self, "strategy.planner", 1, "profile_samples", "rounded", "num_trials")

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:
        """The candidate with the least estimated time that fits memory."""
        job = profile.job
        job.check_request()
        samples = self._draw(profile)
        bound = job.request if self.requests_bind_encoder else LayoutRequest()

        def rising_candidates(sized: Profile) -> Iterator[Candidate]:
            rising = candidates(Orchestration(sized, samples, bound), self.rounded, self.count_step)
            first = next(rising, None)
            if first is None:
                asked = " ".join(f"layout.{n}={d}" for n in ("tp", "cp", "pp", "dp") if (d := getattr(job.request, n)))
                raise UserError(
                    f"{asked or 'layout'}: no stages of encoder and LLM of model={job.model.name} fit the "
                    f"{job.cluster.num_ranks} ranks of cluster={job.cluster.name}"
                )
            yield first
            yield from rising

        return chosen_layout(profile, rising_candidates, make_program, self.num_trials)

    def _draw(self, profile: Profile) -> SampleShapes:
        for _ in range(MAX_DRAWS):
            samples = profile.samples.draw(self.profile_samples)
            if all(len(module.units(samples)) for module in profile.job.model.modules):
                break
        return samples


def candidates(space: Orchestration, keep: int, count_step: bool) -> Iterator[Candidate]:
    """Layouts by rising estimate; of every DP and TP of the backbone the one with the least T, then the next.

    Every backbone waits with what its next layout cannot fall below: a bound, then its T, then its T with the step.
    Only the one with the least is looked at further, so that most layouts are neither rounded nor placed.
    """
    searches = [points(space, problems, keep) for problems in space.problems()]
    queue: list[tuple[float, int, Solution | Layout | None]] = [(-np.inf, n, None) for n in range(len(searches))]
    while queue:
        seconds, number, reached = heappop(queue)
        if isinstance(reached, tuple):
            layout = space.place(*reached)
            step_s = space.profile.programs.step_s(layout) if count_step else 0.0
            heappush(queue, (decisive(seconds + step_s), number, layout))
            continue
        if isinstance(reached, Layout):
            yield Candidate(seconds, reached)
        for least_s, solution in islice(searches[number], 1):
            heappush(queue, (least_s, number, solution))


def points(space: Orchestration, problems: Sequence[SubProblem], keep: int) -> Iterator[tuple[float, Solution | None]]:
    """Integer points by rising T, the best ``keep`` of every sub-problem, and before them bounds without a point.

    Sub-problems are of one DP and TP of the backbone. No point that follows a bound is below it: first T under perfect
    division, then that of the convex program with the memory of states alone. The latter relaxes the former's integers:
    every option of a group is at least its fewest GPUs, for state bytes rise with DP, and at most its most; a stage is
    at least as slow as the group's work over its GPUs, and its stages together take at least w_u / x_u. Sub-problems
    are rounded by rising optimum, activations included, each only when no point found so far comes before it.
    """
    least_s = space.least_s(problems)
    yield decisive(float(least_s.min())), None
    bound_s, optimum_s = (decisive(np.maximum(least_s, bound)) for bound in space.solve(problems))
    yield float(bound_s.min()), None
    number = count()
    queue: list[tuple[float, int, SubProblem, Point | None]] = [
        (float(optimum_s[index]), next(number), problems[index], None)
        for index in np.argsort(least_s, kind="stable")
        if np.isfinite(optimum_s[index])
    ]
    heapify(queue)
    while queue:
        seconds, _, problem, point = heappop(queue)
        if point is not None:
            yield seconds, (problem, point)
            continue
        for estimate, option in space.rounded(problem, keep):
            heappush(queue, (estimate, next(number), problem, option))
