"""The cost truth of a program: durations of actions, delays of dependencies, bytes of memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from entrain_bench.arrays import FloatArray, IntArray, rows_of
from entrain_bench.costs.layer_times import LayerTimes
from entrain_bench.costs.links import all_gather_s, all_reduce_s
from entrain_bench.costs.memory import Memory
from entrain_bench.costs.relay import Relay, relay_between_modules
from entrain_bench.costs.roofline import PassTimes, Roofline
from entrain_bench.costs.transform import colocated_transforms
from entrain_bench.program import Pass, Program
from entrain_bench.program.assignment import Chunks
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.cluster import ClusterSpec
from entrain_bench.specs.framework import Framework
from entrain_bench.specs.layer import BF16_BYTES, FP32_BYTES
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.specs.shapes import SampleShapes


@dataclass(frozen=True, slots=True)
class Prices:
    """What executing a program costs.

    Attributes:
        duration_s: of each action, communication inside it included ``[actions]``.
        comm_s: the communication inside it ``[actions]``.
        delay_s: from the end of an action to the moment the one that depends on it has the data ``[dependencies]``;
            0 where the relay carries them.
        relay: what passes through a single rank, if the layout has one.
    """

    duration_s: FloatArray
    comm_s: FloatArray
    delay_s: FloatArray
    relay: Relay | None = None


@dataclass(frozen=True, slots=True)
class CostTruth:
    """Costs of a model on a cluster; executors charge them, strategies see only a profile of them.

    Attributes:
        framework: how the framework runs the job.
        measured: layer times of a profile of the device; None: the roofline's.
    """

    model: ModelSpec
    cluster: ClusterSpec
    framework: Framework = field(default_factory=Framework)
    measured: LayerTimes | None = None

    @property
    def layer_times(self) -> LayerTimes:
        """Layer times on the cluster."""
        return self.measured or Roofline(self.cluster)

    @property
    def beyond(self) -> CostTruth:
        """The same truth, with layer times also outside what was measured: for estimates, which may be wrong."""
        return replace(self, measured=self.measured.beyond) if self.measured else self

    @property
    def memory(self) -> Memory:
        """Memory sizes under the same settings."""
        return Memory(self.model, self.framework)

    def unit_times(self, module: ModuleSpec, placed: ModuleLayout, lengths: IntArray) -> PassTimes:
        """Times of sequences that each form a chunk alone ``[sequences, stages]``."""
        counts = module.kind_counts(placed.layers_per_stage)
        loads = self.layer_times.loads(module, lengths)
        return self.layer_times.stages_s(module, loads, counts, placed.tp, placed.cp, placed.recompute)

    def chunk_times(self, module: ModuleSpec, placed: ModuleLayout, shapes: SampleShapes, chunks: Chunks) -> PassTimes:
        """Times of packed chunks ``[chunks, stages]``."""
        counts = module.kind_counts(placed.layers_per_stage)
        loads = self.layer_times.loads(module, module.lengths(shapes, chunks.members), chunks.offsets)
        return self.layer_times.stages_s(module, loads, counts, placed.tp, placed.cp, placed.recompute)

    def price(self, program: Program) -> Prices:
        """Durations and delays of a whole program."""
        duration, comm = np.zeros(program.num_actions), np.zeros(program.num_actions)
        layout = program.layout
        for index, (module, placed) in enumerate(zip(self.model.modules, layout.modules, strict=True)):
            times = self.chunk_times(module, placed, program.shapes, program.chunks[index])
            first, size = int(program.first_action[index]), times.forward_s.size
            forward, backward = slice(first, first + size), slice(first + size, first + 2 * size)
            comm[forward], comm[backward] = times.forward_comm_s.ravel(), times.backward_comm_s.ravel()
            duration[forward], duration[backward] = times.forward_s.ravel(), times.backward_s.ravel()
        comm += self.memory.offload_bytes(program) / self.cluster.device.host_bandwidth_bytes_per_s
        step = int(program.first_action[-1])
        for kind in (Pass.GRAD_SYNC, Pass.OPTIMIZER):
            for module, placed in zip(self.model.modules, layout.modules, strict=True):
                seconds = self.step_s(module, placed, kind)
                (comm if kind is Pass.GRAD_SYNC else duration)[step : step + placed.pp] = seconds
                step += placed.pp
        delay, relay = self._delays(program), None
        if layout.single_rank_boundary:
            tier = self.cluster.group_tier(np.concatenate([placed.ranks.ravel() for placed in layout.modules]))
            relay = relay_between_modules(program, delay > 0, tier)
            delay[relay.transfer >= 0] = 0.0
        return Prices(duration + comm, comm, delay, relay)

    def step_s(self, module: ModuleSpec, placed: ModuleLayout, kind: Pass) -> FloatArray:
        """Gradient synchronisation or optimizer step of each stage ``[stages]``, not overlapped with backward.

        Gradients travel in fp32. With a distributed optimizer they are reduce-scattered and the bf16 weights
        all-gathered; without, all-reduced. A tied embedding held by two blocks is all-reduced between them.
        """
        parameters = self.memory.stage_parameters(module, placed) / module.weight_shards(placed.tp)
        group = module.weight_copies(placed.tp, placed.dp * placed.cp)
        if kind is Pass.OPTIMIZER:
            shard = group if self.framework.distributed_optimizer else 1
            return self.layer_times.optimizer_s(parameters / shard)
        seconds = np.zeros(placed.pp)
        if group > 1:
            tiers = self.cluster.tier_of(placed.ranks.min(axis=(0, 2)), placed.ranks.max(axis=(0, 2)))
            for index in np.unique(tiers):
                tier, held = self.cluster.tiers[index], parameters[tiers == index]
                if self.framework.distributed_optimizer:
                    scatter = all_gather_s(FP32_BYTES * held, group, tier)
                    seconds[tiers == index] = scatter + all_gather_s(BF16_BYTES * held, group, tier)
                else:
                    seconds[tiers == index] = all_reduce_s(FP32_BYTES * held, group, tier)
        if module.config.tied_embeddings and not placed.is_closed:
            tier = self.cluster.group_tier(placed.ranks[0, [0, -1]])
            embedding = FP32_BYTES * module.layers[0].parameters / placed.tp
            seconds[[0, -1]] += all_reduce_s(embedding, 2, tier)
        return seconds

    def _delays(self, program: Program) -> FloatArray:
        """Transfer time along each dependency; none between actions of the same ranks."""
        layout = program.layout
        source, target = program.dep_actions, rows_of(program.dep_offsets)
        width, latency, per_byte = self._links(layout)
        first_block = np.cumsum([0, *(module.dp * module.pp for module in layout.modules)])
        pp = np.array([module.pp for module in layout.modules])

        def block(action: IntArray) -> IntArray:
            module = program.module[action]
            number: IntArray = first_block[module] + program.replica[action] * pp[module] + program.stage[action]
            return number

        a, b = block(source), block(target)
        low, high = self._first_ranks(layout), self._last_ranks(layout)
        tier = self.cluster.tier_of(np.minimum(low[a], low[b]), np.maximum(high[a], high[b]))
        delay = latency[tier] + program.dep_bytes * per_byte[tier] / np.minimum(width[a], width[b])
        # Different widths need the destination to gather what arrived in other shards.
        reshard = width[a] != width[b]
        if reshard.any():
            inner = self.cluster.tier_of(low[b], high[b])
            share = (width[b] - 1) / width[b]
            gather = (width[b] - 1) * latency[inner] + program.dep_bytes * share * per_byte[inner]
            delay += np.where(reshard, gather, 0.0)
        collective, seconds = colocated_transforms(program, self.cluster)
        delay[collective] = seconds
        rank_set = np.concatenate([blocks.rank_set for blocks in layout.blocks])
        return np.where((program.dep_bytes == 0) | (rank_set[a] == rank_set[b]), 0.0, delay)

    def _links(self, layout: Layout) -> tuple[IntArray, FloatArray, FloatArray]:
        """Ranks of every block of every module, and latency (s) and inverse bandwidth (s/byte) of every tier."""
        width = np.concatenate([np.full(m.dp * m.pp, m.ranks_per_block) for m in layout.modules])
        latency = np.array([tier.latency_s for tier in self.cluster.tiers])
        per_byte = np.array([1.0 / tier.bandwidth_bytes_per_s for tier in self.cluster.tiers])
        return width, latency, per_byte

    @staticmethod
    def _first_ranks(layout: Layout) -> IntArray:
        """Lowest rank of every block of every module."""
        return np.concatenate([m.ranks.min(axis=2).ravel() for m in layout.modules])

    @staticmethod
    def _last_ranks(layout: Layout) -> IntArray:
        """Highest rank of every block of every module."""
        return np.concatenate([m.ranks.max(axis=2).ravel() for m in layout.modules])
