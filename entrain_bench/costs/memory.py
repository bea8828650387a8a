"""Device memory: what a stage holds all the time, and what each chunk adds between its forward and its backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from entrain_bench.arithmetic import matmul
from entrain_bench.arrays import FloatArray, IntArray, rows_of, sum_rows
from entrain_bench.program import Pass, Program
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.framework import Framework
from entrain_bench.specs.layer import BF16_BYTES, FP32_BYTES
from entrain_bench.specs.model import ModelSpec, ModuleSpec

# bf16 weight and fp32 gradient; fp32 weight and both Adam moments.
WEIGHT_BYTES = BF16_BYTES + FP32_BYTES
OPTIMIZER_BYTES = 3 * FP32_BYTES


@dataclass(frozen=True, slots=True)
class _OffloadWindow:
    """Entries of ``lane_actions`` between which an offloaded module's states are away, one of each a lane.

    Attributes:
        parameters: of the module on a rank of the lane.
    """

    last_forward: IntArray
    first_backward: IntArray
    parameters: FloatArray


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory sizes of a model under the settings of the framework."""

    model: ModelSpec
    framework: Framework = field(default_factory=Framework)

    def parameter_bytes(self, copies: IntArray | int) -> FloatArray:
        """Weight, gradient and optimizer states of a parameter on a rank, of which ``copies`` ranks hold the same."""
        return np.asarray(
            WEIGHT_BYTES + OPTIMIZER_BYTES / np.asarray(copies if self.framework.distributed_optimizer else 1)
        )

    def stage_parameters(self, module: ModuleSpec, placed: ModuleLayout) -> FloatArray:
        """Parameters of each stage before tensor parallelism ``[stages]``; a tied embedding is held by both its stages.

        On one set of ranks the tied embedding is one tensor.
        """
        return self._parameters(module, placed, [layer.parameters for layer in module.kinds])

    def learning_parameters(self, module: ModuleSpec, placed: ModuleLayout) -> FloatArray:
        """Those of ``stage_parameters`` that learn."""
        return self._parameters(module, placed, [layer.parameters * layer.learns for layer in module.kinds])

    def _parameters(self, module: ModuleSpec, placed: ModuleLayout, per_kind: list[int]) -> FloatArray:
        parameters = matmul(module.kind_counts(placed.layers_per_stage), per_kind)
        if module.config.tied_embeddings and placed.is_closed:
            parameters[-1] -= per_kind[0]
        return parameters

    def stage_state_bytes(self, module: ModuleSpec, placed: ModuleLayout) -> FloatArray:
        """Weights, gradients and optimizer states on one rank of each stage ``[stages]``; of frozen layers weights."""
        shards, copies = module.weight_shards(placed.tp), module.weight_copies(placed.tp, placed.dp * placed.cp)
        learning = self.learning_parameters(module, placed)
        frozen = self.stage_parameters(module, placed) - learning
        return np.asarray(learning / shards * self.parameter_bytes(copies) + frozen / shards * BF16_BYTES)

    def token_bytes(self, module: ModuleSpec, placed: ModuleLayout) -> tuple[FloatArray, FloatArray]:
        """Bytes a token adds on one rank of each stage ``[stages]``.

        Returns:
            What is kept from forward to backward, and what exists only while a backward recomputes its largest layer.
        """
        counts = module.kind_counts(placed.layers_per_stage)
        kept = np.array([layer.activation_bytes_per_token for layer in module.kinds])
        inputs = np.array([layer.input_bytes_per_token for layer in module.kinds])
        if not placed.recompute:
            return matmul(counts, kept) / placed.ranks_per_block, np.zeros(len(counts))
        working = np.max(np.where(counts > 0, kept, 0.0), axis=1)
        return matmul(counts, inputs) / placed.ranks_per_block, working / placed.ranks_per_block

    def lane_state_bytes(self, layout: Layout) -> FloatArray:
        """Weights, gradients and optimizer states on a rank of each lane ``[lanes]``, all its modules together."""
        placed = zip(self.model.modules, layout.modules, strict=True)
        return layout.lane_sums([self.stage_state_bytes(module, own) for module, own in placed])

    def offload_bytes(self, program: Program) -> FloatArray:
        """Bytes each action moves over a rank's host link ``[actions]``: bf16 weights out, and back.

        A module's last forward on a rank ends with the way out, its first backward begins with the way back. Gradient
        buffers hold nothing in between; they are released, not copied.
        """
        moved = np.zeros(program.num_actions)
        for window in self._offload_windows(program):
            for entries in (window.last_forward, window.first_backward):
                np.maximum.at(moved, program.lane_actions[entries], BF16_BYTES * window.parameters)
        return moved

    def _offload_windows(self, program: Program) -> Iterator[_OffloadWindow]:
        """Where the states of offloaded modules are away; nowhere on lanes with a backward before the last forward."""
        layout = program.layout
        kind, owner = program.kind[program.lane_actions], program.module[program.lane_actions]
        lane = rows_of(program.lane_offsets)
        for index, placed in enumerate(layout.modules):
            if not placed.offload:
                continue
            last, first = np.full(layout.num_lanes, -1), np.full(layout.num_lanes, -1)
            forwards = np.flatnonzero((owner == index) & (kind == Pass.FORWARD))
            backwards = np.flatnonzero((owner == index) & (kind == Pass.BACKWARD))
            last[lane[forwards]] = forwards
            first[lane[backwards[::-1]]] = backwards[::-1]
            lanes = np.flatnonzero((last >= 0) & (last < first))
            held = [self.stage_parameters(m, p) / p.tp for m, p in zip(self.model.modules, layout.modules, strict=True)]
            only = [values * (other == index) for other, values in enumerate(held)]
            yield _OffloadWindow(last[lanes], first[lanes], layout.lane_sums(only)[lanes])

    def action_bytes(self, program: Program) -> tuple[FloatArray, FloatArray]:
        """Bytes each action adds to a rank (forwards) or frees (backwards, negative), and needs while it runs."""
        change, working = np.zeros(program.num_actions), np.zeros(program.num_actions)
        for index, (module, placed) in enumerate(zip(self.model.modules, program.layout.modules, strict=True)):
            chunks = program.chunks[index]
            tokens = sum_rows(chunks.offsets, module.lengths(program.shapes, chunks.members))
            kept, extra = (tokens[:, None] * per_token for per_token in self.token_bytes(module, placed))
            forward, backward = program.forward_actions(index), program.backward_actions(index)
            change[forward], change[backward], working[backward] = kept, -kept, extra
        return change, working

    def over_program(self, program: Program) -> FloatArray:
        """Memory of a rank during and after each entry of ``lane_actions``, its states included ``[2, entries]``.

        A forward's activations count from its start, a backward's until its end, so order decides and not time. Weights
        and gradients of an offloaded module are away between its last forward and its first backward on the rank.
        """
        change, working = self.action_bytes(program)
        action, lane = program.lane_actions, rows_of(program.lane_offsets)
        running = np.cumsum(change[action])
        before = np.concatenate(([0.0], running))[program.lane_offsets[:-1]]
        away = np.zeros(len(action) + 1)
        for window in self._offload_windows(program):
            away[window.last_forward + 1] += WEIGHT_BYTES * window.parameters
            away[window.first_backward] -= WEIGHT_BYTES * window.parameters
        after = running + (self.lane_state_bytes(program.layout) - before)[lane] - np.cumsum(away)[:-1]
        during = np.where(program.kind[action] == Pass.BACKWARD, after - change[action] + working[action], after)
        return np.stack([during, after])

    def peak_bytes(self, program: Program) -> FloatArray:
        """Highest memory of a rank of each lane ``[lanes]``."""
        return np.maximum.reduceat(self.over_program(program)[0], program.lane_offsets[:-1])
