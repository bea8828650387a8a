"""The end of an iteration, and what of it reaches into the next: gradients, optimizer, weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from entrain_bench.arrays import FloatArray, IntArray, take_rows
from entrain_bench.costs.buckets import bucket_parameters, gather_lead_s, gather_stall_s, sync_lag_s
from entrain_bench.costs.layer_times import LayerTimes
from entrain_bench.costs.links import all_gather_s, all_reduce_s
from entrain_bench.costs.memory import Memory
from entrain_bench.costs.roofline import PassTimes
from entrain_bench.program import Pass, Program
from entrain_bench.program.layout import ModuleLayout
from entrain_bench.specs.cluster import ClusterSpec, LinkTier
from entrain_bench.specs.layer import BF16_BYTES, FP32_BYTES
from entrain_bench.specs.model import ModuleSpec


@dataclass(frozen=True, slots=True)
class Steps:
    """Times of the step, for every stage of every module in their order ``[stages]`` where nothing else is said.

    Attributes:
        overlapped: whether gradients are synchronised beside what else ranks do, rather than after it.
        sync_s: how long the gradients of a stage occupy the links.
        optimizer_s: optimizer step.
        gather_s: gather of the weights right after it; 0 if it goes on beside the first forwards.
        last_backwards: the last backward of each replica on the stage, one array a stage.
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
    """What follows the last backward of a stage, and precedes its first forward, at least ``[stages]``."""

    gather_s: FloatArray
    sync_s: FloatArray
    optimizer_s: FloatArray


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What steps cost on the cluster under the framework's settings."""

    memory: Memory
    layer_times: LayerTimes
    cluster: ClusterSpec

    def optimizer_s(self, module: ModuleSpec, placed: ModuleLayout) -> FloatArray:
        """Optimizer step of each stage ``[stages]``; a distributed optimizer steps a shard on every rank."""
        shard = self._copies(module, placed) if self.memory.framework.distributed_optimizer else 1
        return self.layer_times.optimizer_s(self._parameters(module, placed) / shard)

    def sync_s(self, module: ModuleSpec, placed: ModuleLayout) -> FloatArray:
        """How long the gradients of each stage occupy the links, in their buckets ``[stages]``."""
        return np.array(
            [self._syncs_s(buckets, module, placed, stage).sum() for stage, buckets in self._buckets(module, placed)]
        )

    def gather_s(self, module: ModuleSpec, placed: ModuleLayout) -> FloatArray:
        """All-gather of the bf16 weights of each stage, in their buckets ``[stages]``; none if they are not sharded."""
        return np.array(
            [self._gathers_s(buckets, module, placed, stage).sum() for stage, buckets in self._buckets(module, placed)]
        )

    def tied_s(self, module: ModuleSpec, placed: ModuleLayout) -> float:
        """All-reduce of a tied embedding between the two blocks that hold it, after all other gradients are reduced."""
        if not module.config.tied_embeddings or placed.is_closed or not module.layers[0].learns:
            return 0.0
        tier = self.cluster.group_tier(placed.ranks[0, [0, -1]])
        return float(all_reduce_s(FP32_BYTES * module.layers[0].parameters / placed.tp, 2, tier))

    def exposed(self, module: ModuleSpec, placed: ModuleLayout) -> ExposedStep:
        """What no overlap can hide: of the buckets only the one with a stage's first layers."""
        framework = self.memory.framework
        gather_s, sync_s = np.zeros(placed.pp), np.zeros(placed.pp)
        for stage, buckets in self._buckets(module, placed):
            gathers, syncs = (make(buckets, module, placed, stage) for make in (self._gathers_s, self._syncs_s))
            # First layers without parameters hide a part of their bucket.
            last = slice(-1, None) if self._layer_parameters(module, placed, stage)[0] else slice(0, 0)
            gather_s[stage] = gathers[last if framework.overlap_param_gather else slice(None)].sum()
            sync_s[stage] = syncs[last if framework.overlap_grad_reduce else slice(None)].sum()
        sync_s[[0, -1]] += self.tied_s(module, placed)
        return ExposedStep(gather_s, sync_s, self.optimizer_s(module, placed))

    def steps(self, program: Program) -> Steps:
        """Times of a program's step."""
        framework, layout = self.memory.framework, program.layout
        backwards: list[IntArray] = []
        lags, tied, first_stage = [], [], 0
        for index, (module, placed) in enumerate(zip(program.model.modules, layout.modules, strict=True)):
            mine = last_of_stages(program, index)
            backwards += mine
            times = _LayerTimes.of(self.layer_times, program, index, np.concatenate(mine))
            for stage, buckets in self._buckets(module, placed):
                bucket_s = self._syncs_s(buckets, module, placed, stage)
                lag = np.zeros(len(mine[stage]))
                if framework.overlap_grad_reduce and len(lag) and bucket_s.sum() > 0:
                    layer_s = times.of_stage(mine[stage], stage, Pass.BACKWARD)
                    lag = sync_lag_s(layer_s, self._layer_parameters(module, placed, stage), buckets, bucket_s)
                lags.append(lag)
            if seconds := self.tied_s(module, placed):
                tied.append((first_stage, first_stage + placed.pp - 1, seconds))
            first_stage += placed.pp
        modules = [*zip(program.model.modules, layout.modules, strict=True)]
        sync_s = np.concatenate([self.sync_s(module, placed) for module, placed in modules])
        optimizer_s = np.concatenate([self.optimizer_s(module, placed) for module, placed in modules])
        gather_s = np.concatenate([self.gather_s(module, placed) for module, placed in modules])
        return Steps(
            framework.overlap_grad_reduce,
            sync_s,
            optimizer_s,
            np.zeros_like(gather_s) if framework.overlap_param_gather else gather_s,
            tuple(backwards),
            tuple(lags),
            tuple(tied),
        )

    def gathers(self, program: Program) -> tuple[FloatArray, FloatArray]:
        """What the gathers of weights do to the first forward of every stage and replica ``[actions]``.

        Aligned gathers of a rank's modules follow each other over its links, in the order of a forward.

        Returns:
            The earliest start of each action, and how long it waits once all else is ready.
        """
        release, stall = np.zeros(program.num_actions), np.zeros(program.num_actions)
        framework, launched = self.memory.framework, np.zeros(program.layout.num_lanes)
        if not framework.overlap_param_gather:
            return release, stall
        for index, (module, placed) in enumerate(zip(program.model.modules, program.layout.modules, strict=True)):
            firsts = first_of_stages(program, index)
            times = _LayerTimes.of(self.layer_times, program, index, np.concatenate(firsts))
            for stage, buckets in self._buckets(module, placed):
                bucket_s = self._gathers_s(buckets, module, placed, stage)
                if not bucket_s.sum():
                    continue
                layer_s = times.of_stage(firsts[stage], stage, Pass.FORWARD)
                passes = layer_s, self._layer_parameters(module, placed, stage), buckets, bucket_s
                if framework.align_param_gather:
                    lanes = program.layout.blocks[index].of_stage(stage)
                    begin = launched[lanes].max()
                    release[firsts[stage]] = begin + gather_lead_s(*passes)
                    launched[lanes] = begin + bucket_s.sum()
                else:
                    stall[firsts[stage]] = gather_stall_s(*passes)
        return release, stall

    def _copies(self, module: ModuleSpec, placed: ModuleLayout) -> int:
        return module.weight_copies(placed.tp, placed.dp * placed.cp)

    def _parameters(self, module: ModuleSpec, placed: ModuleLayout) -> FloatArray:
        """Parameters that learn on a rank of each stage ``[stages]``."""
        return self.memory.learning_parameters(module, placed) / module.weight_shards(placed.tp)

    def _layer_parameters(self, module: ModuleSpec, placed: ModuleLayout, stage: int) -> FloatArray:
        """Parameters that learn on a rank, of each layer of a stage ``[layers]``; one of a pair that is tied on it."""
        first = sum(placed.layers_per_stage[:stage])
        held = module.layers[first : first + placed.layers_per_stage[stage]]
        parameters = np.array([float(layer.parameters * layer.learns) for layer in held])
        if module.config.tied_embeddings and placed.is_closed and stage == placed.pp - 1:
            parameters[-1] -= module.layers[0].parameters * module.layers[0].learns
        return parameters / module.weight_shards(placed.tp)

    def _buckets(self, module: ModuleSpec, placed: ModuleLayout) -> Iterator[tuple[int, FloatArray]]:
        copies, overlapped = self._copies(module, placed), self.memory.framework.overlap_grad_reduce
        for stage, parameters in enumerate(self._parameters(module, placed)):
            # megatron-core splits the first stage of a pipeline only: later ones have its backwards to hide behind.
            yield stage, bucket_parameters(float(parameters), copies, overlapped and stage == 0)

    def _ring(self, module: ModuleSpec, placed: ModuleLayout, stage: int) -> LinkTier:
        """The links of a ring through the ranks that hold the same weights of a stage."""
        return self.cluster.ring_tier(placed.ranks[:, stage, :: module.weight_shards(placed.tp)])

    def _syncs_s(self, buckets: FloatArray, module: ModuleSpec, placed: ModuleLayout, stage: int) -> FloatArray:
        """Reduction of each bucket's fp32 gradients: a reduce-scatter where states are sharded, else an all-reduce."""
        copies = self._copies(module, placed)
        if copies == 1:
            return np.zeros(len(buckets))
        reduce_s = all_gather_s if self.memory.framework.distributed_optimizer else all_reduce_s
        return reduce_s(FP32_BYTES * buckets, copies, self._ring(module, placed, stage))

    def _gathers_s(self, buckets: FloatArray, module: ModuleSpec, placed: ModuleLayout, stage: int) -> FloatArray:
        copies = self._copies(module, placed)
        if copies == 1 or not self.memory.framework.distributed_optimizer:
            return np.zeros(len(buckets))
        return all_gather_s(BF16_BYTES * buckets, copies, self._ring(module, placed, stage))


@dataclass(frozen=True, slots=True)
class _LayerTimes:
    """Times of every layer kind on the chunks of some actions of a module.

    Attributes:
        chunks: those chunks, ascending.
        kinds: times of each kind, ``[chunks]`` each.
    """

    program: Program
    index: int
    chunks: IntArray
    kinds: list[PassTimes]

    @classmethod
    def of(cls, layer_times: LayerTimes, program: Program, index: int, actions: IntArray) -> _LayerTimes:
        module, placed, rows = program.model.modules[index], program.layout.modules[index], program.chunks[index]
        chunks = np.unique(program.chunk[actions]).astype(np.int64)
        offsets, entries = take_rows(rows.offsets, chunks)
        loads = layer_times.loads(module, module.lengths(program.shapes, rows.members[entries]), offsets)
        kinds = layer_times.layers_s(module, loads, placed.tp, placed.cp)
        return cls(program, index, chunks, kinds)

    def of_stage(self, actions: IntArray, stage: int, kind: Pass) -> FloatArray:
        """Time of each layer of a stage in the given actions, communication included ``[actions, layers]``."""
        module, placed = self.program.model.modules[self.index], self.program.layout.modules[self.index]
        first = sum(placed.layers_per_stage[:stage])
        kinds = module.layer_kind[first : first + placed.layers_per_stage[stage]]
        forward = np.stack([times.forward_s + times.forward_comm_s for times in self.kinds])
        seconds = forward
        if kind is Pass.BACKWARD:
            seconds = np.stack([times.backward_s + times.backward_comm_s for times in self.kinds])
            remade = [placed.recompute and layer.recomputed and layer.backward_share > 0 for layer in module.kinds]
            seconds = seconds + np.array(remade)[:, None] * forward
        row = np.searchsorted(self.chunks, self.program.chunk[actions])
        return np.ascontiguousarray(seconds[kinds][:, row].T)


def last_of_stages(program: Program, index: int) -> list[IntArray]:
    """The last backward of every replica on each stage of a module, one array a stage."""
    return _extreme(program, index, Pass.BACKWARD, slice(None))


def first_of_stages(program: Program, index: int) -> list[IntArray]:
    """The first forward of every replica on each stage of a module, one array a stage."""
    return _extreme(program, index, Pass.FORWARD, slice(None, None, -1))


def _extreme(program: Program, index: int, kind: Pass, order: slice) -> list[IntArray]:
    """Of a module's actions of a kind those that come last in the given order of the lanes, one array a stage."""
    placed = program.layout.modules[index]
    actions = program.lane_actions[order]
    actions = actions[(program.module[actions] == index) & (program.kind[actions] == kind)]
    found = np.full((placed.pp, placed.dp), -1)
    # Of several values for one place the last is kept.
    found[program.stage[actions], program.replica[actions]] = actions
    return [row[row >= 0] for row in found]
