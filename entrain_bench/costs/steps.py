"""The end of an iteration, and what of it reaches into the next: gradients, optimizer, weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from entrain_bench.base.arrays import FloatArray, IntArray, digest_of, freeze, rows_of
from entrain_bench.base.remembered import remembered
from entrain_bench.costs.buckets import bucket_parameters, gather_lead_s, gather_stall_s, sync_lag_s
from entrain_bench.costs.layer_times import LayerTimes, priced_by_width
from entrain_bench.costs.links import all_gather_s, all_reduce_s
from entrain_bench.costs.loads import Loads
from entrain_bench.costs.memory import Memory
from entrain_bench.costs.sharding import layer_parameters
from entrain_bench.program import Pass, Program
from entrain_bench.program.columns import covered_layers
from entrain_bench.program.layout import ModuleLayout
from entrain_bench.specs.cluster import ClusterSpec, LinkTier
from entrain_bench.specs.layer import BF16_BYTES
from entrain_bench.specs.model import ModuleSpec


@dataclass(frozen=True, slots=True)
class Steps:
    """Times of the step, for every stage of every module in their order ``[stages]`` where nothing else is said.

    Attributes:
        overlapped: whether gradients are synchronised beside what else ranks do, rather than after it.
        sync_s: how long the gradients of a stage occupy the links.
        optimizer_s: optimizer step.
        gather_s: gather of the weights right after it; 0 if it goes on beside the first forwards.
        last_backwards: the last pass of each replica on the stage that makes gradients of its weights, one array a
            stage.
        lag_s: from the end of each of them to the end of the synchronisation, links free.
        tied: pairs of stages that hold one embedding, and the seconds that reducing it between them takes after both
            are synchronised.
    """

    overlapped: bool
    sync_s: FloatArray
    optimizer_s: FloatArray
    gather_s: FloatArray
    last_backwards: tuple[IntArray, ...]
    lag_s: tuple[FloatArray, ...]
    tied: tuple[tuple[int, int, float], ...]

    @property
    def comm_s(self) -> FloatArray:
        """Communication inside each step, first of the synchronisations, then of the optimizer steps ``[2 stages]``."""
        return np.concatenate([np.zeros_like(self.sync_s) if self.overlapped else self.sync_s, self.gather_s])


@dataclass(frozen=True, slots=True)
class ExposedStep:
    """Least seconds after the last backward of a stage, and before its first forward ``[stages]``."""

    gather_s: FloatArray
    sync_s: FloatArray
    optimizer_s: FloatArray


@dataclass(frozen=True, slots=True)
class Traffic:
    """Gradient and weight traffic of a stage, in buckets in the order of a backward.

    Attributes:
        kinds: kind of each layer ``[layers]``.
        layer_parameters: parameters that learn on a rank, of each layer ``[layers]``; one of a pair that is tied on it.
        parameters: of each bucket ``[buckets]``.
        sync_s: reduction of its gradients ``[buckets]``.
        gather_s: all-gather of its bf16 weights ``[buckets]``; 0 if they are not sharded.
    """

    kinds: IntArray
    layer_parameters: FloatArray
    parameters: FloatArray
    sync_s: FloatArray
    gather_s: FloatArray


@dataclass(frozen=True, slots=True)
class PassEnds:
    """Where the passes of a module begin and end on each of its stages; lists of one array a stage.

    Attributes:
        traffic: what of its weights travels then.
        exposed: what no overlap hides of it ``[stages]``.
        firsts: first forward of every lane, those of several lanes once ``[passes]``.
        lasts: last backward, or weight pass, of every lane ``[passes]``.
        forward_s: time of each layer in the former, communication included ``[passes, layers]``.
        backward_s: likewise in the latter.
    """

    traffic: list[Traffic]
    exposed: ExposedStep
    firsts: list[IntArray]
    lasts: list[IntArray]
    forward_s: list[FloatArray]
    backward_s: list[FloatArray]


# Layouts of a module whose traffic is remembered.
MAX_KNOWN = 512


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Times of steps on the cluster under the framework's settings."""

    memory: Memory
    layer_times: LayerTimes
    cluster: ClusterSpec
    _known: dict[tuple[object, ...], tuple[ModuleSpec, list[Traffic], ExposedStep]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _rings: dict[tuple[object, ...], list[LinkTier]] = field(default_factory=dict, repr=False, compare=False)

    def optimizer_s(self, module: ModuleSpec, placed: ModuleLayout) -> FloatArray:
        """Optimizer step of each stage ``[stages]``; a distributed optimizer steps a shard on every rank."""
        sharded = self.memory.framework.distributed_optimizer or placed.sharded
        shard = self.memory.sharing(module, placed) if sharded else 1
        return self.layer_times.optimizer_s(self._parameters(module, placed) / shard)

    def sync_s(self, module: ModuleSpec, placed: ModuleLayout) -> FloatArray:
        """How long the gradients of each stage occupy the links, in their buckets ``[stages]``."""
        return np.array([stage.sync_s.sum() for stage in self.traffic(module, placed)])

    def gather_s(self, module: ModuleSpec, placed: ModuleLayout) -> FloatArray:
        """All-gather of the bf16 weights of each stage, in their buckets ``[stages]``; none if they are not sharded."""
        return np.array([stage.gather_s.sum() for stage in self.traffic(module, placed)])

    def tied_s(self, module: ModuleSpec, placed: ModuleLayout) -> float:
        """All-reduce of a tied embedding between the two blocks that hold it, after all other gradients are reduced."""
        if not module.config.tied_embeddings or placed.is_closed or not module.layers[0].learns:
            return 0.0
        tier = self.cluster.group_tier(placed.ranks[0, [0, -1]])
        return float(all_reduce_s(self.memory.gradient_bytes * module.layers[0].parameters / placed.tp, 2, tier))

    def exposed(self, module: ModuleSpec, placed: ModuleLayout) -> ExposedStep:
        """Return the step that no overlap hides: only the bucket with a stage's first layers."""
        return self._of(module, placed)[2]

    def exposed_beside(
        self, module: ModuleSpec, placed: ModuleLayout, forward_s: FloatArray, backward_s: FloatArray
    ) -> ExposedStep:
        """Return the step that the layers of the first forward and the last backward ``[layers]`` do not hide."""
        framework = self.memory.framework
        least = self.exposed(module, placed)
        gather_s = least.gather_s.copy()
        sync_s = least.sync_s.copy()
        bounds = np.cumsum(placed.layers_per_stage[:-1])
        passes = zip(np.split(forward_s, bounds), np.split(backward_s, bounds), strict=True)
        tied_s = np.zeros(placed.pp)
        tied_s[[0, -1]] += self.tied_s(module, placed)
        traffic = self.traffic(module, placed)
        for stage, (stage_traffic, (forward, backward)) in enumerate(zip(traffic, passes, strict=True)):
            if len(stage_traffic.parameters) < 2:
                # A single bucket hides nowhere.
                continue
            if framework.overlap_grad_reduce and stage_traffic.sync_s.any():
                sync_s[stage] = self._lag_s(backward[None], stage_traffic)[0] + tied_s[stage]
            if framework.overlap_param_gather and stage_traffic.gather_s.any():
                gather_s[stage] = self._wait_s(forward[None], stage_traffic)[0]
        return ExposedStep(gather_s, sync_s, least.optimizer_s)

    def _lag_s(self, layer_s: FloatArray, traffic: Traffic) -> FloatArray:
        """From the end of backwards to the end of the synchronisation of their gradients, links free ``[passes]``."""
        lag_s = sync_lag_s(layer_s, traffic.layer_parameters, traffic.parameters, traffic.sync_s)
        return self._slowed_s(lag_s, traffic.sync_s)

    def _wait_s(self, layer_s: FloatArray, traffic: Traffic) -> FloatArray:
        """From the launch of aligned gathers to the forward; of other gathers how long they stall it ``[passes]``."""
        waited_s = gather_lead_s if self.memory.framework.align_param_gather else gather_stall_s
        waits_s = waited_s(layer_s, traffic.layer_parameters, traffic.parameters, traffic.gather_s)
        return self._slowed_s(waits_s, traffic.gather_s)

    def _slowed_s(self, exposed_s: FloatArray, bucket_s: FloatArray) -> FloatArray:
        """Seconds that buckets add to a pass: ``exposed_s`` do not fit beside it, the rest slows it ``[passes]``."""
        return exposed_s + self.cluster.device.overlap_cost * (bucket_s.sum() - exposed_s)

    def traffic(self, module: ModuleSpec, placed: ModuleLayout) -> list[Traffic]:
        """Return each stage's traffic of gradients and weights; none if weights are sharded."""
        return self._of(module, placed)[1]

    def _of(self, module: ModuleSpec, placed: ModuleLayout) -> tuple[ModuleSpec, list[Traffic], ExposedStep]:

        def made() -> tuple[ModuleSpec, list[Traffic], ExposedStep]:
            traffic = self._traffic(module, placed)
            return module, traffic, self._exposed(module, placed, traffic)

        key = id(module), placed.tp, placed.cp, placed.layers_per_stage, placed.digest_of_ranks, placed.sharded
        return remembered(self._known, key, made, MAX_KNOWN)

    def _exposed(self, module: ModuleSpec, placed: ModuleLayout, traffic: Sequence[Traffic]) -> ExposedStep:
        framework = self.memory.framework
        gather_s = np.zeros(placed.pp)
        sync_s = np.zeros(placed.pp)
        for stage, stage_traffic in enumerate(traffic):
            # First layers without parameters hide a part of their bucket.
            last = slice(-1, None) if stage_traffic.layer_parameters[0] else slice(0, 0)
            gather_s[stage] = stage_traffic.gather_s[last if framework.overlap_param_gather else slice(None)].sum()
            sync_s[stage] = stage_traffic.sync_s[last if framework.overlap_grad_reduce else slice(None)].sum()
        sync_s[[0, -1]] += self.tied_s(module, placed)
        exposed = ExposedStep(gather_s, sync_s, self.optimizer_s(module, placed))
        freeze(exposed.gather_s, exposed.sync_s, exposed.optimizer_s)
        return exposed

    def _traffic(self, module: ModuleSpec, placed: ModuleLayout) -> list[Traffic]:
        framework = self.memory.framework
        sharing = self.memory.sharing(module, placed)
        copies = module.weight_copies(placed.tp, placed.dp * placed.cp)
        # Rings go through the ranks that hold the same weights of a stage, or share out its optimizer states.
        rings = placed.ranks[:, :, :: module.weight_shards(placed.tp)].swapaxes(0, 1).reshape(placed.pp, -1)
        across = self._ring_tiers(rings[:, ::sharing])
        if framework.distributed_optimizer:
            rings = rings[:, :sharing]
        learning = layer_parameters(module, learning=True, closed=placed.is_closed) / module.weight_shards(placed.tp)
        bounds = np.cumsum(placed.layers_per_stage[:-1])
        layers = np.split(module.layer_kind, bounds), np.split(learning, bounds)
        held = self._parameters(module, placed).tolist()
        stages = zip(*layers, held, self._ring_tiers(rings), across, strict=True)
        stages_traffic = list[Traffic]()
        size = self.memory.gradient_bytes
        # What is sharded travels within its passes (``sharding``).
        travels = copies > 1 and not placed.sharded
        for stage_kinds, stage_learning, total, ring, instances in stages:
            # megatron-core splits the first stage of a pipeline only: later ones have its backwards to hide behind.
            parameters = bucket_parameters(total, copies, framework.overlap_grad_reduce and not stages_traffic)
            sync_s = gather_s = np.zeros(len(parameters))
            if travels and framework.distributed_optimizer:
                # Scattered inside an instance of the optimizer, each shard then reduced over all of them.
                sync_s = all_gather_s(size * parameters, sharing, ring)
                sync_s = sync_s + all_reduce_s(size * parameters / sharing, copies // sharing, instances)
                gather_s = all_gather_s(BF16_BYTES * parameters, sharing, ring)
            elif travels:
                sync_s = all_reduce_s(size * parameters, copies, ring)
            traffic = stage_kinds, stage_learning, parameters, sync_s, gather_s
            freeze(*traffic)
            stages_traffic.append(Traffic(*traffic))
        return stages_traffic

    def _ring_tiers(self, rings: IntArray) -> list[LinkTier]:
        return remembered(self._rings, digest_of(rings), lambda: self.cluster.ring_tiers(rings), MAX_KNOWN)

    def ends(self, program: Program, index: int, loads: Loads) -> PassEnds:
        """Where the passes of one of a program's modules begin and end, given what its chunks carry."""
        module = program.model.modules[index]
        placed = program.layout.modules[index]
        firsts = first_of_stages(program, index)
        lasts = last_of_stages(program, index)
        split = program.splits_backward(index)
        layers_s = self.layer_times.layers_s
        kinds = priced_by_width(
            placed,
            program.chunks[index].replica,
            loads,
            lambda group, part, _: layers_s(module, part, group.tp, group.cp, split),
        )
        # [chunks, kinds]
        forward_s = np.stack([times.ahead_s for times in kinds], axis=1)
        backward_s = np.stack([times.back_s if times.weight_s is None else times.weight_s for times in kinds], axis=1)
        _, traffic, exposed = self._of(module, placed)
        # What is recomputed is there for the weight pass.
        again_s = np.zeros_like(backward_s)
        if (placed.recompute or program.remade) and not split:
            again_s = np.stack([times.again_s for times in kinds], axis=1)
            again_s *= [kind.recomputed and kind.backward_share > 0 for kind in module.kinds]
        if placed.recompute:
            backward_s = backward_s + again_s

        def of_stages(seconds: FloatArray, actions: list[IntArray]) -> list[FloatArray]:
            pairs = zip(actions, traffic, strict=True)
            return [seconds[program.chunk[stage_actions]].take(stage.kinds, axis=1) for stage_actions, stage in pairs]

        layer_s = of_stages(backward_s, lasts)
        if program.remade and again_s.any():
            covered = np.split(covered_layers(module), np.cumsum(placed.layers_per_stage[:-1]))
            for stage, (total, once_more) in enumerate(zip(layer_s, of_stages(again_s, lasts), strict=True)):
                remade = program.remade[index][program.chunk[lasts[stage]], stage]
                total += once_more * (covered[stage] & (covered[stage].cumsum() <= remade[:, None]))
        return PassEnds(traffic, exposed, firsts, lasts, of_stages(forward_s, firsts), layer_s)

    def ends_of_passes(
        self, program: Program, duration_s: FloatArray, layer_s: Sequence[tuple[FloatArray, FloatArray]]
    ) -> list[PassEnds]:
        """As ``ends``, given seconds of whole passes ``[actions]``; layers share them in proportion to ``layer_s``."""
        module_ends = []
        for index, (placed, module_layer_s) in enumerate(zip(program.layout.modules, layer_s, strict=True)):
            bounds = np.cumsum(placed.layers_per_stage[:-1])
            sides = []
            firsts = first_of_stages(program, index)
            lasts = last_of_stages(program, index)
            for stage_actions, seconds in zip((firsts, lasts), module_layer_s, strict=True):
                shares = [part / part.sum() for part in np.split(np.maximum(seconds, 1e-12), bounds)]
                sides.append(
                    [duration_s[one][:, None] * share for one, share in zip(stage_actions, shares, strict=True)]
                )
            _, traffic, exposed = self._of(program.model.modules[index], placed)
            module_ends.append(PassEnds(traffic, exposed, firsts, lasts, *sides))
        return module_ends

    def steps(self, program: Program, ends: Sequence[PassEnds]) -> Steps:
        """Times of a program's step."""
        framework = self.memory.framework
        modules = [*zip(program.model.modules, program.layout.modules, strict=True)]
        lags = []
        tied = []
        first_stage = 0
        for (module, placed), module_ends in zip(modules, ends, strict=True):
            for traffic, layer_s in zip(module_ends.traffic, module_ends.backward_s, strict=True):
                lags.append(np.zeros(len(layer_s)))
                if framework.overlap_grad_reduce and traffic.sync_s.any():
                    lags[-1] = self._lag_s(layer_s, traffic)
            if seconds := self.tied_s(module, placed):
                tied.append((first_stage, first_stage + placed.pp - 1, seconds))
            first_stage += placed.pp
        stages = [traffic for module_ends in ends for traffic in module_ends.traffic]
        gather_s = np.array([traffic.gather_s.sum() for traffic in stages])
        return Steps(
            framework.overlap_grad_reduce,
            np.array([traffic.sync_s.sum() for traffic in stages]),
            np.concatenate([module_ends.exposed.optimizer_s for module_ends in ends]),
            np.zeros_like(gather_s) if framework.overlap_param_gather else gather_s,
            tuple(last for module_ends in ends for last in module_ends.lasts),
            tuple(lags),
            tuple(tied),
        )

    def gathers(self, program: Program, ends: Sequence[PassEnds]) -> tuple[FloatArray, FloatArray]:
        """Return how weight gathers delay the first forward of every stage and replica ``[actions]``.

        Aligned gathers of a rank's modules follow each other over its links, in the order of a forward.

        Returns:
            The earliest start of each action, and how long it waits once all else is ready.
        """
        release = np.zeros(program.num_actions)
        stall = np.zeros(program.num_actions)
        framework = self.memory.framework
        launched = np.zeros(program.layout.num_lanes)
        if not framework.overlap_param_gather:
            return release, stall
        for blocks, module_ends in zip(program.layout.blocks, ends, strict=True):
            for stage, (traffic, firsts) in enumerate(zip(module_ends.traffic, module_ends.firsts, strict=True)):
                if not traffic.gather_s.any():
                    continue
                wait_s = self._wait_s(module_ends.forward_s[stage], traffic)
                if framework.align_param_gather:
                    lanes = blocks.of_stage(stage)
                    begin = launched[lanes].max()
                    release[firsts] = begin + wait_s
                    launched[lanes] = begin + traffic.gather_s.sum()
                else:
                    stall[firsts] = wait_s
        return release, stall

    def _parameters(self, module: ModuleSpec, placed: ModuleLayout) -> FloatArray:
        """Parameters that learn on a rank of each stage ``[stages]``."""
        return self.memory.learning_parameters(module, placed) / module.weight_shards(placed.tp)


def last_of_stages(program: Program, index: int) -> list[IntArray]:
    """The last backward, or weight pass, of every lane on each stage of a module, one array a stage."""
    return _last(program, index, Pass.WEIGHT if program.splits_backward(index) else Pass.BACKWARD, slice(None))


def first_of_stages(program: Program, index: int) -> list[IntArray]:
    """The first forward of every lane on each stage of a module, one array a stage."""
    return _last(program, index, Pass.FORWARD, slice(None, None, -1))


def _last(program: Program, index: int, kind: Pass, order: slice) -> list[IntArray]:
    placed = program.layout.modules[index]
    actions = program.lane_actions[order]
    lanes = rows_of(program.lane_offsets)[order]
    mine = (program.module[actions] == index) & (program.kind[actions] == kind)
    actions = actions[mine]
    lanes = lanes[mine]
    extremes = np.full((placed.pp, program.layout.num_lanes), -1)
    # Of several values for one place the last is kept.
    extremes[program.stage[actions], lanes] = actions
    return [np.unique(row[row >= 0]) for row in extremes]
