"""DistTrain's planner and schedule: TP and DP of the backbone enumerated, GPUs solved for, then rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import count, islice, product
from math import ceil
from typing import ClassVar, NamedTuple

import numpy as np

from entrain_bench.balancing.candidates import Candidate
from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.options import TrialOptions
from entrain_bench.balancing.planning import (
    Island,
    partitions,
    place_islands,
    recompute_choices,
    recompute_factor,
    stage_sums,
)
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.rounds import splits
from entrain_bench.balancing.schedules import OneForwardOneBackward, check_order
from entrain_bench.balancing.tuning import chosen_layout
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.job import LayoutRequest, divisors
from entrain_bench.specs.layer import BF16_BYTES
from entrain_bench.specs.parse import Count
from entrain_bench.specs.shapes import SampleShapes

from .orchestration import GroupLoads, Point, best_integers, iteration_s, solve, undominated

# Values that are computed once for all sub-problems.
LOOKED_UP = ("layer_s", "splits", "stage_s", "dps", "options", "state_bytes", "needed_gpus")
# Draws until the profiled samples exercise every module; a lone sample may have no items.
MAX_DRAWS = 64
# Integer solutions kept of each sub-problem, should the best not fit memory.
ROUNDED = 3


class SubProblem(NamedTuple):
    """Choices before GPUs are divided: DP of the backbone, TP and recomputation of each group."""

    backbone_dp: int
    tps: tuple[int, ...]
    again: tuple[bool, ...]


def by_group(problems: Sequence[SubProblem], value: Callable[[int, int, bool], float]) -> FloatArray:
    """A value of each group at its TP and recomputation ``[problems, groups]``."""
    known = cache(value)
    return np.array([[*map(known, range(len(one.tps)), one.tps, one.again)] for one in problems])


@dataclass(frozen=True)
class Orchestration:
    """The planner's problem: groups of modules, their costs, and the candidate degrees; the backbone holds the LLM."""

    profile: Profile  # for the job, whose requested degrees hold for the backbone
    samples: SampleShapes  # behind the cost functions
    bound: LayoutRequest | None = None  # requested degrees that hold for the other groups; None: those of the job
    groups: tuple[tuple[int, ...], ...] = field(init=False)
    backbone: int = field(init=False)

    def __post_init__(self) -> None:
        model = self.profile.job.model
        object.__setattr__(self, "groups", model.module_groups)
        object.__setattr__(self, "backbone", model.module_groups.index((model.llm_index,)))
        for name in LOOKED_UP:
            object.__setattr__(self, name, cache(getattr(self, name)))

    @property
    def cp(self) -> int:
        """DistTrain does not choose CP; a requested one holds for all groups."""
        return self.profile.job.request.cp or 1

    def layer_s(self, module: int, tp: int) -> FloatArray:
        """C_u by layer: seconds of both passes that a sample spends there, in full microbatches ``[layers]``."""
        size = self.profile.job.microbatch_size
        spec = self.profile.job.model.modules[module]
        batches = np.resize(np.arange(len(self.samples)), (-(-len(self.samples) // size), size))
        seconds = np.zeros(len(spec.layers))
        for batch in batches:
            shapes = self.samples.take(batch)
            lengths = spec.lengths(shapes, spec.units(shapes))
            if len(lengths):
                seconds += self.profile.layers.layer_s(spec, lengths, tp, self.cp)
        return np.asarray(seconds / batches.size)

    def splits(self, module: int, tp: int) -> list[tuple[int, ...]]:
        """Layers of each stage, for 1, 2, ... stages."""
        return partitions(self.layer_s(module, tp))

    def stage_s(self, group: int, tp: int) -> FloatArray:
        """Seconds of a sample at all stages of a group, and at its slowest, for 1, 2, ... stages ``[2, stages]``."""
        slowest = []
        for pp in range(self.most_stages(group)):
            sums = [stage_sums(self.layer_s(m, tp), self.splits(m, tp)[pp]) for m in self.groups[group]]
            stages = np.sum(sums, axis=0)
            slowest.append((stages.sum(), stages.max()))
        return np.array(slowest).T

    def most_stages(self, group: int) -> int:
        """Stages of a group at one layer each."""
        return min(len(self.profile.job.model.modules[m].layers) for m in self.groups[group])

    def _requested(self, group: int) -> LayoutRequest:
        """Degrees that are requested of a group."""
        request = self.profile.job.request
        return request if group == self.backbone or self.bound is None else self.bound

    def tps(self, group: int) -> list[int]:
        """TP a group may have: powers of two in a node that divide heads and feed-forward width."""
        job = self.profile.job
        if tp := self._requested(group).tp:
            return [tp]
        powers = (tp for tp in divisors(job.cluster.gpus_per_node) if not tp & (tp - 1))
        return [tp for tp in powers if all(splits(job.model.modules[m], tp) for m in self.groups[group])]

    def backbone_dps(self) -> list[int]:
        """DP the backbone may have: microbatches of all replicas divide the global batch."""
        job = self.profile.job
        if job.request.dp:
            return [job.request.dp]
        most = min(job.cluster.num_ranks, job.global_batch // job.microbatch_size)
        return [dp for dp in range(1, most + 1) if job.global_batch % (dp * job.microbatch_size) == 0]

    def dps(self, group: int, backbone_dp: int) -> list[int]:
        """Return DP candidates of other groups: divisors of the backbone's, or multiples that split microbatches."""
        job = self.profile.job
        if group == self.backbone or self._requested(group).dp:
            return [backbone_dp]
        return [*divisors(backbone_dp), *(backbone_dp * split for split in divisors(job.microbatch_size)[1:])]

    def problems(self) -> list[list[SubProblem]]:
        """Every DP of the backbone, TP and recomputation of the groups, by DP and TP of the backbone."""
        every_tp = list(product(*map(self.tps, range(len(self.groups)))))
        choices = recompute_choices(self.profile.job, self.groups)
        by_degrees: dict[tuple[int, int], list[SubProblem]] = {}
        for dp, tps, again in product(self.backbone_dps(), every_tp, choices):
            by_degrees.setdefault((dp, tps[self.backbone]), []).append(SubProblem(dp, tps, again))
        return [*by_degrees.values()]

    def works(self, problems: Sequence[SubProblem]) -> FloatArray:
        """GPU-seconds w_u of one pipeline step in each group ``[problems, groups]``, for one DP of the backbone."""
        step = problems[0].backbone_dp * self.profile.job.microbatch_size

        def work(group: int, tp: int, again: bool) -> float:
            unit_s = sum(float(self.layer_s(module, tp).sum()) for module in self.groups[group])
            return tp * self.cp * step * recompute_factor(again) * unit_s

        return by_group(problems, work)

    def _backbone_s(self, problem: SubProblem, works: FloatArray) -> FloatArray:
        """M C_lm, the backbone's own share of T: its work over the ranks that share a layer ``[problems]``."""
        width = problem.tps[self.backbone] * self.cp * problem.backbone_dp
        return np.asarray(works[:, self.backbone] / width)

    def least_s(self, problems: Sequence[SubProblem]) -> FloatArray:
        """Return T if all GPUs shared all work equally, with only the backbone's warm-up ``[problems]``."""
        works = self.works(problems)
        job = self.profile.job
        steps = works.sum(axis=1) / job.cluster.num_ranks
        more = job.num_microbatches(problems[0].backbone_dp) - 1
        return np.asarray(self._backbone_s(problems[0], works) + more * steps)

    def rounded(self, problem: SubProblem, keep: int) -> list[tuple[float, Point]]:
        """The best integer points of a sub-problem and their seconds, by real stages."""
        job = self.profile.job
        groups = [
            self.options(group, tp, problem.backbone_dp, r)
            for group, (tp, r) in enumerate(zip(problem.tps, problem.again, strict=True))
        ]
        steps = job.num_microbatches(problem.backbone_dp)
        return best_integers(groups, job.cluster.num_ranks, steps, keep, job.request.pp)

    def options(self, group: int, tp: int, backbone_dp: int, again: bool) -> FloatArray:
        """The options of a group; if ``layout.pp`` is free, only those that none betters in GPUs and times."""
        job = self.profile.job
        width = tp * self.cp
        most = min(self.most_stages(group), job.request.pp or job.cluster.num_ranks)
        rows = []
        total_s, slowest_s = self.stage_s(group, tp)
        for dp in self.dps(group, backbone_dp):
            share = recompute_factor(again) * job.microbatch_size * backbone_dp / dp
            least = self.state_bytes(group, tp, dp) / (width * dp * job.planning_budget_bytes)
            pp = np.arange(max(1, ceil(least)), min(most, job.cluster.num_ranks // (width * dp)) + 1)
            times_s = share * total_s[pp - 1], share * slowest_s[pp - 1]
            rows.append(np.array([width * dp * pp, pp, *times_s, np.full(len(pp), dp)], np.float64))
        every_option = np.concatenate(rows, axis=1)
        return every_option if job.request.pp else undominated(every_option)

    def solve(self, problems: Sequence[SubProblem]) -> tuple[FloatArray, FloatArray]:
        """Return T of the convex program with memory of states, and with activations; else infinity ``[problems]``."""
        job = self.profile.job
        works = self.works(problems)
        dp = problems[0].backbone_dp
        num_steps = job.num_microbatches(dp)
        num_ranks = job.cluster.num_ranks
        stages = [self.dps(group, dp)[-1] * self.most_stages(group) for group in range(len(self.groups))]
        most = np.array([p.tps for p in problems]) * (self.cp * np.array(stages, np.float64))
        fills = np.arange(len(self.groups)) != self.backbone

        def solved(chosen: IntArray, activations: bool) -> tuple[FloatArray, FloatArray]:
            """GPUs and T of the chosen problems, not numbers if there are not enough."""
            loads = GroupLoads(works[chosen], self.fewest(problems, activations)[chosen], most[chosen], fills)
            gpus = solve(loads, num_ranks, num_steps)
            more_s = iteration_s(loads, gpus, num_steps)
            return gpus, self._backbone_s(problems[0], works[chosen]) + more_s

        gpus, states_s = solved(np.arange(len(problems)), False)
        held_s = states_s.copy()
        # Where the best GPUs hold the activations as well, they are the best that do.
        short = np.flatnonzero(np.any(gpus < self.fewest(problems, True), axis=1))
        held_s[short] = solved(short, True)[1]
        held_s = np.where(np.isnan(held_s), states_s, held_s)
        return np.nan_to_num(states_s, nan=np.inf), np.nan_to_num(held_s, nan=np.inf)

    def state_bytes(self, group: int, tp: int, dp: int) -> float:
        """Weights, gradients and optimizer states on all ranks of a group."""
        total = 0.0
        for spec in (self.profile.job.model.modules[m] for m in self.groups[group]):
            copies = spec.weight_copies(tp, dp * self.cp)
            total += spec.learning_parameters * copies * float(self.profile.memory.parameter_bytes(copies))
            total += spec.frozen_parameters * copies * BF16_BYTES
        return total

    def fewest(self, problems: Sequence[SubProblem], activations: bool) -> FloatArray:
        """Return the fewest GPUs with which a group exists and fits memory, for one backbone ``[problems, groups]``."""
        dp = problems[0].backbone_dp

        def fewest(group: int, tp: int, again: bool) -> float:
            least = float(tp * self.cp * self.dps(group, dp)[0])
            return max(least, self.needed_gpus(group, tp, dp, again, activations))

        return by_group(problems, fewest)

    def needed_gpus(self, group: int, tp: int, backbone_dp: int, again: bool, activations: bool) -> float:
        """Return GPUs that hold a group's states; with activations also one step's, or the backbone's full pipeline."""
        job = self.profile.job
        dp = self.dps(group, backbone_dp)[0]
        room = job.planning_budget_bytes
        held = 0.0
        for spec in (job.model.modules[m] for m in self.groups[group] if activations):
            tokens = spec.lengths(self.samples, spec.units(self.samples)).sum() / len(self.samples)
            layer_bytes = [
                x.remade_from_bytes_per_token if again else x.activation_bytes_per_token for x in spec.layers
            ]
            held += backbone_dp * job.microbatch_size * float(tokens) * sum(layer_bytes)
        if group == self.backbone:
            room -= held / (dp * tp * self.cp)
            held = 0.0
        return (self.state_bytes(group, tp, dp) + held) / room if room > 0 else np.inf

    def place(self, problem: SubProblem, point: Point) -> Layout:
        """The layout of a solution."""
        job = self.profile.job
        islands = [
            Island(tp, self.cp, dp, self.splits(module, tp)[pp - 1], r)
            for group, (tp, (dp, pp), r) in enumerate(zip(problem.tps, point, problem.again, strict=True))
            for module in self.groups[group]
        ]
        return place_islands(job, islands, job.num_microbatches(point[self.backbone][0]))


type Solution = tuple[SubProblem, Point]


@dataclass(frozen=True, slots=True)
class DistTrainPlanner(TrialOptions):
    """Gives encoder, LLM and generator GPUs and parallelism of their own by the time of a few profiled samples.

    Requested TP, CP and DP hold for all of them.

    Attributes:
        profile_samples: samples behind the cost functions C_u; one, as Entrain's paper says of DistTrain.
    """

    handles_generators: ClassVar[bool] = True
    profile_samples: Count = 1
    num_trials: Count = 1

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:
        """The candidate with the least estimated time that fits memory."""
        job = profile.job
        job.check_request()
        for _ in range(MAX_DRAWS):
            samples = profile.samples.draw(self.profile_samples)
            if all(len(module.units(samples)) for module in job.model.modules):
                break

        def rising_candidates(sized: Profile) -> Iterator[Candidate]:
            return candidates(Orchestration(sized, samples, job.request))

        return chosen_layout(profile, rising_candidates, make_program, self.num_trials)


def candidates(space: Orchestration, keep: int = ROUNDED) -> Iterator[Candidate]:
    """Yield layouts by rising estimate; each backbone (DP and TP) waits with a lower bound of its next layout."""
    searches = [points(space, problems, keep) for problems in space.problems()]
    queue: list[tuple[float, int, Solution | Layout | None]] = [(-np.inf, n, None) for n in range(len(searches))]
    while queue:
        seconds, number, reached = heappop(queue)
        if isinstance(reached, tuple):
            layout = space.place(*reached)
            heappush(queue, (decisive(seconds + space.profile.programs.step_s(layout)), number, layout))
            continue
        if isinstance(reached, Layout):
            yield Candidate(seconds, reached)
        for least_s, solution in islice(searches[number], 1):
            heappush(queue, (least_s, number, solution))


def points(space: Orchestration, problems: Sequence[SubProblem], keep: int) -> Iterator[tuple[float, Solution | None]]:
    """Yield integer points by rising T, the best ``keep`` of every sub-problem, after lower bounds without a point.

    Bounds are T under perfect division, then that of the convex program with the memory of states alone. Sub-problems
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


@dataclass(frozen=True, slots=True)
class DistTrainScheduler(OneForwardOneBackward):
    """1F1B; the k-th microbatches of all groups share their place, brokers join and split them between groups."""

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """The program; ``IncompatibleError`` if modules or microbatches do not form a chain."""
        check_order(profile.job.model, shapes, assignment)
        return self.in_chain(shapes, layout, assignment, profile)
