"""Device memory: what a stage holds all the time, and what each chunk adds between its forward and its backward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entrain_bench.arrays import FloatArray, rows_of, sum_rows
from entrain_bench.layout import Layout, ModuleLayout
from entrain_bench.program import Pass, Program
from entrain_bench.specs.layer import BF16_BYTES, FP32_BYTES
from entrain_bench.specs.model import ModelSpec, ModuleSpec

# bf16 weight and fp32 gradient; fp32 weight and both Adam moments.
WEIGHT_BYTES = BF16_BYTES + FP32_BYTES
OPTIMIZER_BYTES = 3 * FP32_BYTES


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory sizes of a model; the distributed optimizer shards optimizer states over data and context parallelism."""

    model: ModelSpec
    distributed_optimizer: bool = True

    def stage_parameters(self, module: ModuleSpec, placed: ModuleLayout) -> FloatArray:
        """Parameters of each stage before tensor parallelism ``[stages]``; a tied embedding is held by both its stages.

        On a single stage the tied embedding is one tensor.
        """
        counts = module.kind_counts(placed.layers_per_stage)
        parameters = counts @ np.array([layer.parameters for layer in module.kinds], np.float64)
        if module.config.tied_embeddings and placed.pp == 1:
            parameters -= module.layers[0].parameters
        return np.asarray(parameters)

    def stage_state_bytes(self, module: ModuleSpec, placed: ModuleLayout) -> FloatArray:
        """Weights, gradients and optimizer states on one rank of each stage ``[stages]``."""
        shards, copies = module.weight_shards(placed.tp), module.weight_copies(placed.tp, placed.dp * placed.cp)
        parameters = self.stage_parameters(module, placed) / shards
        return parameters * (WEIGHT_BYTES + OPTIMIZER_BYTES / (copies if self.distributed_optimizer else 1))

    def token_bytes(self, module: ModuleSpec, placed: ModuleLayout) -> tuple[FloatArray, FloatArray]:
        """Bytes a token adds on one rank of each stage ``[stages]``.

        Returns:
            What is kept from forward to backward, and what exists only while a backward recomputes its largest layer.
        """
        counts = module.kind_counts(placed.layers_per_stage)
        kept = np.array([layer.activation_bytes_per_token for layer in module.kinds])
        inputs = np.array([layer.input_bytes_per_token for layer in module.kinds])
        if not placed.recompute:
            return counts @ kept / placed.ranks_per_block, np.zeros(len(counts))
        working = np.max(np.where(counts > 0, kept, 0.0), axis=1)
        return counts @ inputs / placed.ranks_per_block, working / placed.ranks_per_block

    def lane_state_bytes(self, layout: Layout) -> FloatArray:
        """Weights, gradients and optimizer states on a rank of each lane ``[lanes]``, all its modules together."""
        total = np.zeros(layout.num_lanes)
        for module, placed, blocks in zip(self.model.modules, layout.modules, layout.blocks, strict=True):
            state = np.tile(self.stage_state_bytes(module, placed), placed.dp)
            np.add.at(total, blocks.lanes, state[rows_of(blocks.offsets)])
        return total

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
        """Memory of a rank after or during each entry of ``lane_actions`` ``[entries]``, its states included.

        A forward's activations count from its start, a backward's until its end, so order decides and not time.
        """
        change, working = self.action_bytes(program)
        action, lane = program.lane_actions, rows_of(program.lane_offsets)
        running = np.cumsum(change[action])
        before = np.concatenate(([0.0], running))[program.lane_offsets[:-1]]
        running = running - before[lane]
        held = np.where(program.kind[action] == Pass.BACKWARD, running - change[action] + working[action], running)
        return held + self.lane_state_bytes(program.layout)[lane]

    def peak_bytes(self, program: Program) -> FloatArray:
        """Highest memory of a rank of each lane ``[lanes]``."""
        return np.maximum.reduceat(self.over_program(program), program.lane_offsets[:-1])
