"""DistTrain's planner: TP of every group and DP of the backbone enumerated, GPUs solved for, then rounded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush
from itertools import count, islice, product
from math import ceil
from typing import ClassVar

import numpy as np

from entrain_bench.arithmetic import decisive
from entrain_bench.arrays import FloatArray
from entrain_bench.errors import UserError, require
from entrain_bench.program.layout import Layout
from entrain_bench.specs.layer import BF16_BYTES
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.strategy.candidates import Candidate, fastest_in_trials
from entrain_bench.strategy.interface import MakeProgram
from entrain_bench.strategy.planning import (
    Island,
    partition_layers,
    place_islands,
    recompute_choices,
    recompute_factor,
    stage_sums,
)
from entrain_bench.strategy.profile import Profile

from .orchestration import GroupLoad, Options, Point, best_integers, iteration_s, solve

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
        for name in ("profile_samples", "rounded", "num_trials"):
            require(getattr(self, name) >= 1, f"strategy.planner.{name}", getattr(self, name), "at least 1")

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:
        """The candidate with the least estimated time that fits memory."""
        job = profile.job
        job.check_request()
        samples = self._draw(profile)

        def candidates(each: Profile) -> Iterator[Candidate]:
            rising = Orchestration(each, samples, self.requests_bind_encoder).candidates(self.rounded, self.count_step)
            first = next(rising, None)
            if first is None:
                asked = " ".join(f"layout.{n}={d}" for n in ("tp", "cp", "pp", "dp") if (d := getattr(job.request, n)))
                raise UserError(
                    f"{asked or 'layout'}: no stages of encoder and LLM of model={job.model.name} fit the "
                    f"{job.cluster.num_ranks} ranks of cluster={job.cluster.name}"
                )
            yield first
            yield from rising

        return fastest_in_trials(profile, candidates, make_program, self.num_trials)

    def _draw(self, profile: Profile) -> SampleShapes:
        for _ in range(MAX_DRAWS):
            samples = profile.draw(self.profile_samples)
            if all(len(module.units(samples)) for module in profile.job.model.modules):
                break
        return samples


@dataclass(frozen=True, slots=True)
class SubProblem:
    """What is fixed before GPUs are shared out: DP of the backbone, TP and recomputation of each group."""

    backbone_dp: int
    tps: tuple[int, ...]
    again: tuple[bool, ...]


@dataclass(frozen=True)
class Orchestration:
    """The planner's problem: groups of modules (the paper's parallelism units), their costs, and what may be chosen.

    The backbone is the group that holds the LLM.
    """

    profile: Profile
    samples: SampleShapes
    requests_bind_encoder: bool = True
    groups: tuple[tuple[int, ...], ...] = field(init=False)
    backbone: int = field(init=False)

    def __post_init__(self) -> None:
        model = self.profile.job.model
        object.__setattr__(self, "groups", model.module_groups)
        object.__setattr__(self, "backbone", model.module_groups.index((model.llm_index,)))
        # Costs are measured and layers split once.
        object.__setattr__(self, "layer_s", cache(self.layer_s))
        object.__setattr__(self, "stage_s", cache(self.stage_s))
        object.__setattr__(self, "module_s", cache(self.module_s))
        object.__setattr__(self, "split", cache(self.split))
        object.__setattr__(self, "options", cache(self.options))
        object.__setattr__(self, "state_bytes", cache(self.state_bytes))

    @property
    def cp(self) -> int:
        """DistTrain does not choose CP; a requested one holds for all groups."""
        return self.profile.job.request.cp or 1

    def layer_s(self, module: int, tp: int) -> FloatArray:
        """Forward and backward seconds a sample spends in each layer ``[layers]``: C_u, by layer.

        Measured on microbatches filled with the profiled samples in turn, linear in the number of samples.
        """
        job, spec = self.profile.job, self.profile.job.model.modules[module]
        count = -(-len(self.samples) // job.microbatch_size)
        batches = np.resize(np.arange(len(self.samples)), (count, job.microbatch_size))
        seconds = np.zeros(len(spec.kinds))
        for batch in batches:
            shapes = self.samples.take(batch)
            lengths = spec.lengths(shapes, spec.units(shapes))
            if len(lengths):
                times = self.profile.measure(spec, lengths, tp, self.cp)
                seconds += [float(t.total_s[0]) for t in times]
        return np.asarray(seconds[spec.layer_kind] / batches.size)

    def module_s(self, module: int, tp: int) -> float:
        """Forward and backward seconds a sample spends in a module: C_u."""
        return float(self.layer_s(module, tp).sum())

    def split(self, module: int, tp: int, pp: int) -> tuple[int, ...]:
        """Layers of each stage."""
        return partition_layers(self.layer_s(module, tp), pp)

    def stage_s(self, group: int, tp: int, pp: int) -> tuple[float, float]:
        """Forward and backward seconds of a sample at all stages of a group, and at its slowest stage."""
        sums = [stage_sums(self.layer_s(m, tp), self.split(m, tp, pp)) for m in self.groups[group]]
        stages = np.sum(sums, axis=0)
        return float(stages.sum()), float(stages.max())

    def most_stages(self, group: int) -> int:
        """Stages of a group at one layer each."""
        return min(len(self.profile.job.model.modules[m].layers) for m in self.groups[group])

    def tps(self, group: int) -> list[int]:
        """TP a group may have: powers of two in a node that divide heads and feed-forward width."""
        job = self.profile.job
        if job.request.tp and (group == self.backbone or self.requests_bind_encoder):
            return [job.request.tp]
        sizes = [size for m in self.groups[group] for size in job.model.modules[m].sharded_sizes.values()]
        node = job.cluster.gpus_per_node
        powers = (2**i for i in range(node.bit_length()))
        return [tp for tp in powers if node % tp == 0 and all(size % tp == 0 for size in sizes)]

    def backbone_dps(self) -> list[int]:
        """DP the backbone may have: microbatches of all replicas divide the global batch."""
        job = self.profile.job
        if job.request.dp:
            return [job.request.dp]
        most = min(job.cluster.num_ranks, job.global_batch // job.microbatch_size)
        return [dp for dp in range(1, most + 1) if job.global_batch % (dp * job.microbatch_size) == 0]

    def dps(self, group: int, backbone_dp: int) -> list[int]:
        """DP a group may have beside the backbone's: a divisor, or a multiple that splits a microbatch evenly."""
        job = self.profile.job
        if group == self.backbone or (job.request.dp and self.requests_bind_encoder):
            return [backbone_dp]
        splits = [s for s in range(2, job.microbatch_size + 1) if job.microbatch_size % s == 0]
        divisors = [d for d in range(1, backbone_dp + 1) if backbone_dp % d == 0]
        return [*divisors, *(backbone_dp * s for s in splits)]

    def candidates(self, keep: int, count_step: bool) -> Iterator[Candidate]:
        """Layouts by rising estimate; of every DP and TP of the backbone the one with the least T, then the next.

        Args:
            keep: integer points of each sub-problem.
            count_step: whether estimates include gradient synchronisation and optimizer.
        """
        by_backbone: dict[tuple[int, int], list[SubProblem]] = {}
        for problem in self.problems():
            by_backbone.setdefault((problem.backbone_dp, problem.tps[self.backbone]), []).append(problem)
        number = count()
        queue: list[tuple[float, int, Iterator[tuple[float, SubProblem, Point]], Layout | None]] = []
        for problems in by_backbone.values():
            heappush(queue, (min(map(self.least_s, problems)), next(number), self.points(problems, keep), None))
        while queue:
            seconds, _, points, layout = heappop(queue)
            if layout is not None:
                yield Candidate(seconds, layout)
            for estimate, problem, point in islice(points, 1):
                layout = self.place(problem.tps, point, problem.again)
                step = self.profile.step_s(layout) if count_step else 0.0
                heappush(queue, (decisive(estimate + step), next(number), points, layout))

    def points(self, problems: Sequence[SubProblem], keep: int) -> Iterator[tuple[float, SubProblem, Point]]:
        """Integer points by rising T, the best ``keep`` of every sub-problem.

        Sub-problems are bounded from below, first by perfect division, then by their convex optimum, and rounded only
        when no other can be better, so that most are never looked at.
        """
        number = count()
        queue: list[tuple[float, int, SubProblem, bool, Point | None]] = []
        for problem in problems:
            heappush(queue, (self.least_s(problem), next(number), problem, False, None))
        while queue:
            seconds, _, problem, solved, point = heappop(queue)
            if point is not None:
                yield seconds, problem, point
            elif solved:
                for estimate, found in self.rounded(problem, keep):
                    heappush(queue, (estimate, next(number), problem, True, found))
            elif (optimum := self.solve(problem)) is not None:
                heappush(queue, (decisive(max(seconds, optimum)), next(number), problem, True, None))

    def problems(self) -> Iterator[SubProblem]:
        """Every DP of the backbone, TP and recomputation of the groups."""
        every_tp = list(product(*map(self.tps, range(len(self.groups)))))
        choices = recompute_choices(self.profile.job, self.groups)
        return (SubProblem(*each) for each in product(self.backbone_dps(), every_tp, choices))

    def works(self, problem: SubProblem) -> list[float]:
        """GPU-seconds w_u of one pipeline step in each group."""
        step = problem.backbone_dp * self.profile.job.microbatch_size
        return [
            tp * self.cp * step * recompute_factor(r) * sum(self.module_s(m, tp) for m in group)
            for group, tp, r in zip(self.groups, problem.tps, problem.again, strict=True)
        ]

    def least_s(self, problem: SubProblem) -> float:
        """T if all GPUs shared all work, without warm-up but the backbone's: no point is below it."""
        works, job = self.works(problem), self.profile.job
        width = problem.tps[self.backbone] * self.cp * problem.backbone_dp
        step = sum(works) / job.cluster.num_ranks
        return works[self.backbone] / width + (job.num_microbatches(problem.backbone_dp) - 1) * step

    def rounded(self, problem: SubProblem, keep: int) -> list[tuple[float, Point]]:
        """The best integer points of a sub-problem and their seconds, by real stages."""
        job = self.profile.job
        groups = [
            self.options(group, tp, problem.backbone_dp, r)
            for group, (tp, r) in enumerate(zip(problem.tps, problem.again, strict=True))
        ]
        steps = job.num_microbatches(problem.backbone_dp)
        return best_integers(groups, job.cluster.num_ranks, steps, keep, job.request.pp)

    def options(self, group: int, tp: int, backbone_dp: int, again: bool) -> Options:
        """What a group may be; of options alike in time, those with fewest GPUs, if the sum of stages is free."""
        job, width = self.profile.job, tp * self.cp
        most = min(self.most_stages(group), job.request.pp or job.cluster.num_ranks)
        rows = []
        for dp in self.dps(group, backbone_dp):
            share = recompute_factor(again) * job.microbatch_size * backbone_dp / dp
            least = self.state_bytes(group, tp, dp) / (width * dp * job.planning_budget_bytes)
            for pp in range(max(1, ceil(least)), min(most, job.cluster.num_ranks // (width * dp)) + 1):
                total, slowest = self.stage_s(group, tp, pp)
                rows.append((dp, pp, width * dp * pp, share * total, share * slowest))
        columns = np.array(rows).reshape(-1, 5).T
        found = Options(*columns[:3].astype(np.int64), *columns[3:])
        return found if job.request.pp else found.undominated()

    def solve(self, problem: SubProblem) -> float | None:
        """T of the convex program; None if memory leaves nothing.

        The activations' memory is dropped if that leaves nothing, for programs decide in the end.
        """
        job = self.profile.job
        num_steps, works = job.num_microbatches(problem.backbone_dp), self.works(problem)
        for activations in (True, False):
            loads = []
            for group, (tp, work) in enumerate(zip(problem.tps, works, strict=True)):
                dps = self.dps(group, problem.backbone_dp)
                fewest = max(float(tp * self.cp * dps[0]), self._fewest(problem, group, dps[0], activations))
                most = float(tp * self.cp * dps[-1] * self.most_stages(group))
                loads.append(GroupLoad(work, fewest, most, group != self.backbone))
            gpus = solve(loads, job.cluster.num_ranks, num_steps)
            if gpus is not None:
                width = problem.tps[self.backbone] * self.cp * problem.backbone_dp
                return works[self.backbone] / width + iteration_s(loads, gpus, num_steps)
        return None

    def state_bytes(self, group: int, tp: int, dp: int) -> float:
        """Weights, gradients and optimizer states on all ranks of a group."""
        total = 0.0
        for spec in (self.profile.job.model.modules[m] for m in self.groups[group]):
            copies = spec.weight_copies(tp, dp * self.cp)
            total += spec.learning_parameters * copies * float(self.profile.memory.parameter_bytes(copies))
            total += spec.frozen_parameters * copies * BF16_BYTES
        return total

    def _fewest(self, problem: SubProblem, group: int, dp: int, activations: bool) -> float:
        """GPUs that hold a group's states, and the activations of at least one step of the pipeline in flight.

        The backbone holds a full pipeline whatever its depth: PP microbatches of 1 / PP of the layers each.
        """
        job, tp, again = self.profile.job, problem.tps[group], problem.again[group]
        room, held = job.planning_budget_bytes, 0.0
        if activations:
            for spec in (job.model.modules[m] for m in self.groups[group]):
                tokens = spec.lengths(self.samples, spec.units(self.samples)).sum() / len(self.samples)
                each = [x.input_bytes_per_token if again else x.activation_bytes_per_token for x in spec.layers]
                held += problem.backbone_dp * job.microbatch_size * float(tokens) * sum(each)
        if group == self.backbone:
            room -= held / (dp * tp * self.cp)
            held = 0.0
        return (self.state_bytes(group, tp, dp) + held) / room if room > 0 else np.inf

    def place(self, tps: Sequence[int], point: Point, again: Sequence[bool]) -> Layout:
        """The layout of a solution."""
        job = self.profile.job
        islands = [
            Island(tp, self.cp, dp, self.split(module, tp, pp), r)
            for group, (tp, (dp, pp), r) in enumerate(zip(tps, point, again, strict=True))
            for module in self.groups[group]
        ]
        return place_islands(job, islands, job.num_microbatches(point[self.backbone][0]))
