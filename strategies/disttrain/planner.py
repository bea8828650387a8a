"""DistTrain's planner: TP of every unit and DP of the backbone enumerated, GPUs solved for, then rounded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product

import numpy as np

from entrain_bench.arrays import FloatArray
from entrain_bench.costs.memory import OPTIMIZER_BYTES, WEIGHT_BYTES
from entrain_bench.errors import UserError, require
from entrain_bench.job import Degrees, Job
from entrain_bench.layout import Layout, ModuleLayout, check_layout
from entrain_bench.planning import (
    Candidate,
    fastest_that_fits,
    partition_layers,
    place_chain,
    recompute_choices,
    recompute_factor,
    stage_sums,
)
from entrain_bench.profile import Profile
from entrain_bench.shapes import SampleShapes
from entrain_bench.strategy import Compose
from strategies.disttrain.orchestration import Point, UnitLoad, local_search, solve

# Draws until the profiled samples exercise every module; a lone sample may have no items.
MAX_DRAWS = 64


@dataclass(frozen=True, slots=True)
class DistTrainPlanner:
    """Gives encoder and LLM GPUs and parallelism of their own by the time of a few profiled samples.

    Attributes:
        profile_samples: samples behind the cost functions C_u; one, as Entrain's paper says of DistTrain.
        requests_bind_encoder: whether requested TP, CP and DP hold for the encoder as for the LLM.
        count_step: whether candidates are compared with gradient synchronisation and optimizer included.
        rounded: integer solutions kept of each sub-problem, should the best not fit memory.
    """

    profile_samples: int = 1
    requests_bind_encoder: bool = True
    count_step: bool = True
    rounded: int = 3

    def __post_init__(self) -> None:
        for name in ("profile_samples", "rounded"):
            require(getattr(self, name) >= 1, f"strategy.planner.{name}", getattr(self, name), "at least 1")

    def plan(self, profile: Profile, compose: Compose) -> Layout:
        """The candidate with the least estimated time that fits memory."""
        job = profile.job
        _check_request(job)
        problem = Orchestration(profile, self._draw(profile), self.requests_bind_encoder)
        candidates = []
        for seconds, tps, point, recompute in problem.solutions(self.rounded):
            layout = problem.place(tps, point, recompute)
            candidates.append(Candidate(seconds + (profile.step_s(layout) if self.count_step else 0.0), layout))
        if not candidates:
            asked = " ".join(f"layout.{n}={d}" for n in ("tp", "cp", "pp", "dp") if (d := getattr(job.request, n)))
            raise UserError(
                f"{asked or 'layout'}: no stages of encoder and LLM of model={job.model.name} fit the "
                f"{job.cluster.num_ranks} ranks of cluster={job.cluster.name}"
            )
        return fastest_that_fits(profile, candidates, compose)

    def _draw(self, profile: Profile) -> SampleShapes:
        for _ in range(MAX_DRAWS):
            samples = profile.draw(self.profile_samples)
            if all(len(module.units(samples)) for module in profile.job.model.modules):
                break
        return samples


@dataclass(frozen=True)
class Orchestration:
    """The planner's problem: units (all encoders together, then the LLM), their costs, and what may be chosen.

    A further unit, such as a generator, is one more entry of ``units``; the backbone is the unit that holds the LLM.
    """

    profile: Profile
    samples: SampleShapes
    requests_bind_encoder: bool = True
    units: tuple[tuple[int, ...], ...] = field(init=False)
    backbone: int = field(init=False)

    def __post_init__(self) -> None:
        modules = self.profile.job.model.modules
        encoders = tuple(index for index, module in enumerate(modules) if module.is_encoder)
        llm = len(modules) - 1
        object.__setattr__(self, "units", tuple(unit for unit in (encoders, (llm,)) if unit))
        object.__setattr__(self, "backbone", len(self.units) - 1)
        # Costs are measured and layers split once.
        object.__setattr__(self, "layer_s", cache(self.layer_s))
        object.__setattr__(self, "stage_s", cache(self.stage_s))
        object.__setattr__(self, "split", cache(self.split))

    @property
    def cp(self) -> int:
        """DistTrain does not choose CP; a requested one holds for all units."""
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

    def split(self, module: int, tp: int, pp: int) -> tuple[int, ...]:
        """Layers of each stage."""
        return partition_layers(self.layer_s(module, tp), pp)

    def stage_s(self, unit: int, tp: int, pp: int, again: bool) -> FloatArray:
        """Forward and backward seconds a sample spends at each stage of a unit ``[pp]``."""
        sums = [stage_sums(self.layer_s(m, tp), self.split(m, tp, pp)) for m in self.units[unit]]
        return np.asarray(np.sum(sums, axis=0) * recompute_factor(again))

    def most_stages(self, unit: int) -> int:
        """Stages of a unit at one layer each."""
        return min(len(self.profile.job.model.modules[m].layers) for m in self.units[unit])

    def tps(self, unit: int) -> list[int]:
        """TP a unit may have: powers of two in a node that divide heads and feed-forward width."""
        job = self.profile.job
        if job.request.tp and (unit == self.backbone or self.requests_bind_encoder):
            return [job.request.tp]
        configs = [job.model.modules[m].config for m in self.units[unit]]
        sizes = [s for c in configs for s in (c.num_heads, c.num_kv_heads, c.ffn_hidden_size)]
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

    def dps(self, unit: int, backbone_dp: int) -> list[int]:
        """DP a unit may have beside the backbone's: a divisor, or a multiple among which a microbatch splits evenly."""
        job = self.profile.job
        if unit == self.backbone or (job.request.dp and self.requests_bind_encoder):
            return [backbone_dp]
        splits = [s for s in range(2, job.microbatch_size + 1) if job.microbatch_size % s == 0]
        divisors = [d for d in range(1, backbone_dp + 1) if backbone_dp % d == 0]
        return [*divisors, *(backbone_dp * s for s in splits)]

    def solutions(self, keep: int) -> Iterator[tuple[float, tuple[int, ...], Point, tuple[bool, ...]]]:
        """Estimated seconds, TP, (DP, PP) and recomputation of the units: the best few of every sub-problem."""
        job = self.profile.job
        every_tp = list(product(*map(self.tps, range(len(self.units)))))
        for backbone_dp, tps, again in product(self.backbone_dps(), every_tp, recompute_choices(len(self.units))):
            dps = [self.dps(unit, backbone_dp) for unit in range(len(self.units))]
            gpus = self._solve(tps, dps, backbone_dp, again)
            if gpus is None:
                continue
            num_steps = job.num_microbatches(backbone_dp)

            def estimate(
                point: Point, tps: tuple[int, ...] = tps, again: tuple[bool, ...] = again, num_steps: int = num_steps
            ) -> float:
                return self.estimate_s(tps, point, again, num_steps)

            seen = local_search(self._starts(tps, dps, gpus), estimate, dps)
            for point in sorted(seen, key=seen.__getitem__)[:keep]:
                yield seen[point], tps, point, again

    def estimate_s(self, tps: Sequence[int], point: Point, again: Sequence[bool], num_steps: int) -> float:
        """T at integers: a microbatch through all stages, then the slowest stage; infinite if infeasible."""
        job = self.profile.job
        stages = [pp for _, pp in point]
        num_ranks = sum(tp * self.cp * dp * pp for tp, (dp, pp) in zip(tps, point, strict=True))
        if num_ranks > job.cluster.num_ranks or (job.request.pp and sum(stages) != job.request.pp):
            return np.inf
        if any(pp > self.most_stages(unit) for unit, pp in enumerate(stages)):
            return np.inf
        backbone_dp = point[self.backbone][0]
        each = [
            self.stage_s(unit, tp, pp, r) * job.microbatch_size * backbone_dp / dp
            for unit, (tp, (dp, pp), r) in enumerate(zip(tps, point, again, strict=True))
        ]
        chain = np.concatenate(each)
        return float(chain.sum() + (num_steps - 1) * chain.max())

    def _solve(
        self, tps: tuple[int, ...], dps: list[list[int]], backbone_dp: int, again: tuple[bool, ...]
    ) -> FloatArray | None:
        """GPUs of each unit; without the activations' memory if that leaves nothing, for programs decide in the end."""
        job = self.profile.job
        num_steps = job.num_microbatches(backbone_dp)
        for activations in (True, False):
            loads = []
            for unit, (tp, r) in enumerate(zip(tps, again, strict=True)):
                step = backbone_dp * job.microbatch_size
                work = tp * self.cp * step * float(sum(self.layer_s(m, tp).sum() for m in self.units[unit]))
                width = tp * self.cp * dps[unit][0]
                fewest = max(float(width), self._fewest(unit, tp, dps[unit][0], step, r, activations))
                most = float(tp * self.cp * dps[unit][-1] * self.most_stages(unit))
                loads.append(UnitLoad(work * recompute_factor(r), fewest, most, unit != self.backbone))
            gpus = solve(loads, job.cluster.num_ranks, num_steps)
            if gpus is not None:
                return gpus
        return None

    def _fewest(self, unit: int, tp: int, dp: int, step: int, again: bool, activations: bool) -> float:
        """GPUs that hold a unit's states, and the activations of at least one step of the pipeline in flight.

        The backbone holds a full pipeline whatever its depth: PP microbatches of 1 / PP of the layers each.
        """
        job = self.profile.job
        specs = [job.model.modules[m] for m in self.units[unit]]
        parameters = sum(spec.parameters for spec in specs)
        shards = 1 if job.distributed_optimizer else dp
        states = parameters * (WEIGHT_BYTES * dp * self.cp + OPTIMIZER_BYTES * shards)
        room, held = job.planning_budget_bytes, 0.0
        if activations:
            for spec in specs:
                tokens = spec.lengths(self.samples, spec.units(self.samples)).sum() / len(self.samples)
                each = [x.input_bytes_per_token if again else x.activation_bytes_per_token for x in spec.layers]
                held += step * float(tokens) * sum(each)
        if unit == self.backbone:
            room -= held / (dp * tp * self.cp)
            held = 0.0
        return (states + held) / room if room > 0 else np.inf

    def _starts(self, tps: Sequence[int], dps: list[list[int]], gpus: FloatArray) -> Iterator[Point]:
        """Integer points around the real solution, for every DP of the units; one stage each if none is feasible."""
        pp = self.profile.job.request.pp
        for dp in product(*dps):
            real = gpus / (np.array(tps) * self.cp * np.array(dp))
            options: list[tuple[int, ...]]
            if pp and len(real) == 2:
                # A requested sum of stages leaves a line; walk it from end to end.
                options = [(first, pp - first) for first in range(1, pp)]
            else:
                near = [sorted({max(1, int(np.floor(r)) + shift) for shift in (-1, 0, 1)}) for r in real]
                options = [*product(*near), (1,) * len(real)]
            yield from (tuple(zip(dp, stages, strict=True)) for stages in options)

    def place(self, tps: Sequence[int], point: Point, again: Sequence[bool]) -> Layout:
        """The layout: a chain of consecutive ranks where all units share TP and DP, else every unit on its own."""
        job = self.profile.job
        layers, recompute = [], []
        for unit, (tp, (_, pp), r) in enumerate(zip(tps, point, again, strict=True)):
            layers += [self.split(module, tp, pp) for module in self.units[unit]]
            recompute += [r] * len(self.units[unit])
        if len({(tp, dp) for tp, (dp, _) in zip(tps, point, strict=True)}) == 1:
            degrees = Degrees(tps[0], self.cp, sum(pp for _, pp in point), point[0][0])
            return place_chain(job, degrees, layers, recompute, leading=len(self.units) > 1)
        return self._place_apart(tps, point, layers, recompute)

    def _place_apart(
        self, tps: Sequence[int], point: Point, layers: list[tuple[int, ...]], recompute: list[bool]
    ) -> Layout:
        """Units on consecutive ranks, the widest TP first so that blocks are aligned; a unit's modules share ranks."""
        job = self.profile.job
        modules: dict[int, ModuleLayout] = {}
        start = 0
        for unit in sorted(range(len(tps)), key=lambda u: -tps[u]):
            shape = (*point[unit], tps[unit] * self.cp)
            ranks = start + np.arange(int(np.prod(shape))).reshape(shape)
            start += ranks.size
            for index in self.units[unit]:
                name = job.model.modules[index].name
                modules[index] = ModuleLayout(name, tps[unit], self.cp, layers[index], ranks, recompute[index])
        num_microbatches = job.num_microbatches(point[self.backbone][0])
        layout = Layout(tuple(modules[index] for index in range(len(modules))), num_microbatches)
        check_layout(layout, job.model, job.cluster)
        return layout


def _check_request(job: Job) -> None:
    node, asked = job.cluster.gpus_per_node, job.request
    if asked.tp:
        require(node % asked.tp == 0, "layout.tp", asked.tp, f"a divisor of the {node} ranks of a node")
    if asked.dp:
        job.num_microbatches(asked.dp)
    if asked.pp:
        most = job.max_stages
        require(asked.pp <= most, "layout.pp", asked.pp, f"at most {most}, the layers of model={job.model.name}")
