"""Device memory: the permanent states of a stage, and the activations of each chunk from forward to backward."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from entrain_bench.base.arithmetic import matmul
from entrain_bench.base.arrays import FloatArray, IntArray, freeze, rows_of, sum_rows
from entrain_bench.base.remembered import remembered
from entrain_bench.costs.communicators import count_communicators
from entrain_bench.costs.edges import token_parts
from entrain_bench.costs.loads import score_area
from entrain_bench.costs.sharding import gathered_bytes
from entrain_bench.program import Pass, Program
from entrain_bench.program.columns import remade_kinds
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.cluster import UNFUSED, DeviceSpec
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.layer import BF16_BYTES, FP32_BYTES
from entrain_bench.specs.model import ModelSpec, ModuleSpec

MAX_TOKENS = 4096
MAX_LAYOUTS = 64
MOMENT_BYTES = 2 * FP32_BYTES


class _OffloadWindow(NamedTuple):
    last_forward: IntArray
    first_backward: IntArray
    parameters: FloatArray
    learning: FloatArray


class HandedTensors(NamedTuple):
    """Tensors that actions hand each other, in bytes on a rank ``[actions]``."""

    received: FloatArray  # from other ranks
    sent: FloatArray  # to other ranks
    held: FloatArray  # by a forward from another module, until its backward


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory sizes of a model under the settings of the framework."""

    model: ModelSpec
    framework: FrameworkOptions = field(default_factory=FrameworkOptions)
    element_bytes: int = BF16_BYTES  # of weights and activations; training on a CPU may be fp32
    device: DeviceSpec | None = None  # its allocator and attention kernels; None: tensors alone, and no scores
    # Bytes per token by the arguments that decide them.
    _tokens: dict[tuple[object, ...], tuple[ModuleSpec, FloatArray, FloatArray]] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )
    # Bytes of the states of the last layouts, whose programs follow each other.
    _states: dict[int, tuple[Layout, FloatArray]] = field(init=False, default_factory=dict, repr=False, compare=False)

    def parameter_bytes(self, copies: IntArray | int, scatters: bool = False) -> FloatArray:
        """Weight, gradient and optimizer states of a parameter on a rank; ``copies`` ranks share out the latter.

        With ``scatters`` they share out gradients as well.
        """
        states = MOMENT_BYTES + (FP32_BYTES if self.element_bytes < FP32_BYTES else 0)
        shared = np.asarray(copies if self.framework.distributed_optimizer else 1)
        if scatters:
            return np.asarray(self.element_bytes + (self.gradient_bytes + states) / shared)
        return np.asarray(self.element_bytes + self.gradient_bytes + states / shared)

    @property
    def reserved(self) -> float:
        """Bytes that the allocator reserves per byte of temporary tensors."""
        return 1.0 + (self.device.allocator_reserve if self.device else 0.0)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient in the buffers that are reduced."""
        return self.framework.gradient_bytes(self.element_bytes)

    def sharing(self, module: ModuleSpec, placed: ModuleLayout) -> int:
        """Ranks that share out the optimizer states of the same weights."""
        copies = module.weight_copies(placed.tp, placed.dp * placed.cp)
        return copies // (placed.nodes if placed.scatters else self.framework.optimizer_instances(module, copies))

    def stage_parameters(self, module: ModuleSpec, placed: ModuleLayout) -> FloatArray:
        """Parameters of stages before TP ``[stages]``; both ends hold a tied embedding, unless on one set of ranks."""
        return _per_stage(module, placed, [layer.parameters for layer in module.padded(placed.tp).kinds])

    def learning_parameters(self, module: ModuleSpec, placed: ModuleLayout) -> FloatArray:
        """Return the trained parameters of stages before TP ``[stages]``."""
        kinds = module.padded(placed.tp).kinds
        return _per_stage(module, placed, [layer.trained_parameters for layer in kinds])

    def expert_parameters(self, module: ModuleSpec, placed: ModuleLayout) -> tuple[FloatArray, FloatArray]:
        """Those of the experts, before TP and EP: all, and those that learn ``[stages]``."""
        kinds = module.padded(placed.tp).kinds
        counts = module.kind_counts(placed.layers_per_stage)
        every = matmul(counts, [float(layer.expert_parameters) for layer in kinds])
        return every, matmul(counts, [float(layer.trained_expert_parameters) for layer in kinds])

    def expert_sharing(self, module: ModuleSpec, placed: ModuleLayout) -> int:
        """Ranks that share out the optimizer states of the same experts: those of expert data parallelism."""
        return max(1, module.weight_copies(placed.tp, placed.dp * placed.cp) // placed.ep)

    def stage_state_bytes(self, module: ModuleSpec, placed: ModuleLayout) -> FloatArray:
        """Weights, gradients and optimizer states on a rank of each stage ``[stages]``; of frozen layers weights."""
        shards = module.weight_shards(placed.tp)
        sharing = self.sharing(module, placed)
        learning = self.learning_parameters(module, placed)
        frozen = self.stage_parameters(module, placed) - learning
        if placed.sharded:
            held = learning * (FP32_BYTES + FP32_BYTES + MOMENT_BYTES) + frozen * self.element_bytes
            kept = learning + frozen
            if placed.ep > 1:
                kept = kept - self.expert_parameters(module, placed)[0] * (1.0 - 1.0 / placed.ep)
            kept = kept * (self.element_bytes * placed.keeps_weights)
            return np.asarray(held / (shards * sharing) + kept / shards)
        each = self.parameter_bytes(sharing, placed.scatters)
        if placed.ep > 1:
            experts, teaching = self.expert_parameters(module, placed)
            every = self.parameter_bytes(self.expert_sharing(module, placed), placed.scatters) * teaching
            own = (every + (experts - teaching) * self.element_bytes) / placed.ep
            rest = (learning - teaching) * each + (frozen - (experts - teaching)) * self.element_bytes
            return np.asarray((own + rest) / shards)
        return np.asarray(learning / shards * each + frozen / shards * self.element_bytes)

    def optimizer_bytes(self, module: ModuleSpec, placed: ModuleLayout) -> FloatArray:
        """Bytes of fp32 copies of gradients, needed on a rank of each stage during its optimizer step ``[stages]``."""
        casts = self.gradient_bytes < FP32_BYTES and not placed.sharded
        shares = self.framework.distributed_optimizer or placed.scatters
        shared = self.sharing(module, placed) if shares else 1
        learning = self.learning_parameters(module, placed) / module.weight_shards(placed.tp)
        each = FP32_BYTES * casts * self.reserved
        if placed.ep > 1:
            own = self.expert_parameters(module, placed)[1] / module.weight_shards(placed.tp)
            copies = self.expert_sharing(module, placed) if shares else 1
            return np.asarray((learning - own) * (each / shared) + own * (each / (placed.ep * copies)))
        return np.asarray(learning * (each / shared))

    def token_bytes(
        self, module: ModuleSpec, placed: ModuleLayout, remade: IntArray | None = None
    ) -> tuple[FloatArray, FloatArray]:
        """Return bytes per token on a rank of each stage, kept and temporary; ``remade``: recomputed layers."""
        counts = module.kind_counts(placed.layers_per_stage)
        if remade is not None and not placed.recompute:
            kept, working = self.layer_bytes(module, placed)
            less, more = self.layer_bytes(module, replace(placed, recompute=True))
            again = remade_kinds(module, placed.layers_per_stage, remade)
            stays = counts - again
            needed = np.maximum(np.where(stays > 0, working, 0.0), np.where(again > 0, more, 0.0))
            return matmul(stays, kept) + matmul(again, less), np.max(needed, axis=-1)

        def made() -> tuple[ModuleSpec, FloatArray, FloatArray]:
            kept, working = self.layer_bytes(module, placed)
            sizes = matmul(counts, kept), np.max(np.where(counts > 0, working, 0.0), axis=1)
            freeze(*sizes)
            return module, *sizes

        asked = id(module), placed.tp, placed.cp, placed.recomputes_layers, placed.layers_per_stage
        return remembered(self._tokens, asked, made, MAX_TOKENS)[1:]

    def _chunk_token_bytes(
        self, module: ModuleSpec, placed: ModuleLayout, replica: IntArray, remade: IntArray | None
    ) -> tuple[FloatArray, FloatArray]:
        if not placed.widths:
            return self.token_bytes(module, placed, remade)
        degree = placed.degree_of_copy[replica]
        kept, extra = np.zeros((2, len(replica), placed.pp))
        for index in np.unique(degree).tolist():
            rows = np.flatnonzero(degree == index)
            kept[rows], extra[rows] = self.token_bytes(
                module, placed.at(index), None if remade is None else remade[rows]
            )
        return kept, extra

    def layer_bytes(self, module: ModuleSpec, placed: ModuleLayout) -> tuple[FloatArray, FloatArray]:
        """Return bytes per token on a rank for a layer of each kind ``[kinds]``: kept, and the most during a pass."""

        def made() -> tuple[ModuleSpec, FloatArray, FloatArray]:
            tp = placed.tp
            kinds = module.padded(tp).kinds
            split = self.framework.splits_tokens(module, tp)
            size = self.element_bytes
            kept = np.array([layer.kept_bytes(tp, split, size) for layer in kinds])
            gathered = np.array([layer.hidden_size * (layer.num_gathers > 0) for layer in kinds])
            working = np.array([layer.working_bytes(tp, size) for layer in kinds]) + gathered * (size * split)
            if placed.recomputes_layers:
                working += np.array([layer.recomputed_bytes(tp, split, size) for layer in kinds])
                kept = np.array([layer.held_bytes(tp, split, size) for layer in kinds])
            each = self.reserved / self.framework.sequence_parts(module, placed.cp)
            sizes = kept * each, working * each
            freeze(*sizes)
            return module, *sizes

        asked = id(module), placed.tp, placed.cp, placed.recomputes_layers
        return remembered(self._tokens, asked, made, MAX_TOKENS)[1:]

    def weight_token_bytes(self, module: ModuleSpec, placed: ModuleLayout) -> FloatArray:
        """Bytes of a token that a weight pass needs, on one rank of each stage ``[stages]``; 0 where nothing learns."""
        kinds = module.padded(placed.tp).kinds
        bytes_per_kind = np.array([layer.weight_pass_bytes(placed.tp, self.element_bytes) for layer in kinds])
        reserved = self.reserved / self.framework.sequence_parts(module, placed.cp)
        return matmul(module.kind_counts(placed.layers_per_stage), bytes_per_kind * reserved)

    def lane_state_bytes(self, layout: Layout) -> FloatArray:
        """Weights, gradients, optimizer states and communicators on a rank of each lane ``[lanes]``."""

        def made() -> tuple[Layout, FloatArray]:
            modules = zip(self.model.modules, layout.modules, strict=True)
            states = layout.lane_sums([self.stage_state_bytes(module, placed) for module, placed in modules])
            if self.framework.communicator_bytes:
                states = states + self.framework.communicator_bytes * count_communicators(self.model, layout)
            freeze(states)
            return layout, states

        return remembered(self._states, id(layout), made, MAX_LAYOUTS)[1]

    def offload_bytes(self, program: Program) -> FloatArray:
        """Bytes each action moves over a rank's host link ``[actions]``: bf16 weights out, and back."""
        moved = np.zeros(program.num_actions)
        for window in self._offload_windows(program):
            for entries in (window.last_forward, window.first_backward):
                np.maximum.at(moved, program.lane_actions[entries], BF16_BYTES * window.parameters)
        return moved

    def _offload_windows(self, program: Program) -> Iterator[_OffloadWindow]:
        """Return when offloaded states are off the device; never on lanes with a backward before the last forward."""
        layout = program.layout
        kind = program.kind[program.lane_actions]
        owner = program.module[program.lane_actions]
        lane = rows_of(program.lane_offsets)
        for index, placed in enumerate(layout.modules):
            if not placed.offload:
                continue
            last = np.full(layout.num_lanes, -1)
            first = np.full(layout.num_lanes, -1)
            forwards = np.flatnonzero((owner == index) & (kind == Pass.FORWARD))
            backwards = np.flatnonzero((owner == index) & (kind == Pass.BACKWARD))
            last[lane[forwards]] = forwards
            first[lane[backwards[::-1]]] = backwards[::-1]
            lanes = np.flatnonzero((last >= 0) & (last < first))
            held = []
            per_stage = [np.zeros(other.pp) for other in layout.modules]
            for count in (self.stage_parameters, self.learning_parameters):
                per_stage[index] = count(self.model.modules[index], placed) / placed.tp
                held.append(layout.lane_sums(per_stage)[lanes])
            yield _OffloadWindow(last[lanes], first[lanes], *held)

    def transfers(self, program: Program) -> HandedTensors:
        """Tensors that the program's actions hand each other; at a module's border a rank has all rows."""
        source = program.dep_actions
        target = rows_of(program.dep_offsets)
        layout = program.layout
        modules = self.model.modules
        inside = program.module[source] == program.module[target]
        block = program.blocks(target)
        shares = np.where(inside, token_parts(program, self.framework)[block], 1)
        size = program.dep_bytes * (self.reserved * self.element_bytes / BF16_BYTES) / shares
        held = np.bincount(
            target, np.where(inside | (program.kind[target] != Pass.FORWARD), 0, size), len(program.kind)
        )
        for index in range(len(modules)):
            forward, backward, _ = program.spans(index)
            held[backward] = held[forward]
        rank_set = np.concatenate([blocks.rank_set for blocks in layout.blocks])
        moved = np.where(rank_set[program.blocks(source)] == rank_set[block], 0.0, size)
        received, sent = (np.bincount(end, moved, len(program.kind)) for end in (target, source))
        return HandedTensors(received, sent, held)

    def posted_bytes(self, program: Program, handed: HandedTensors | None = None) -> FloatArray:
        """Return the maximum bytes of receives posted ahead on a rank of each lane, for any order ``[lanes]``."""
        received = (handed or self.transfers(program)).received[program.lane_actions]
        return self.framework.receives_ahead * np.maximum.reduceat(received, program.lane_offsets[:-1])

    def handed_bytes(self, program: Program) -> tuple[FloatArray, FloatArray]:
        """Return the most bytes that forwards keep of other modules' outputs, and of other transfers ``[lanes]``."""
        handed = self.transfers(program)
        starts = program.lane_offsets[:-1]
        moved = (handed.sent + handed.received)[program.lane_actions]
        held = np.maximum.reduceat(handed.held[program.lane_actions], starts)
        return held, np.maximum.reduceat(moved, starts) + self.posted_bytes(program, handed)

    def action_bytes(self, program: Program, handed: HandedTensors | None = None) -> tuple[FloatArray, FloatArray]:
        """Bytes each action adds to a rank or frees (negative), and needs while it runs ``[actions]``."""
        handed = handed or self.transfers(program)
        change = np.zeros(program.num_actions)
        working = np.zeros(program.num_actions)
        for index, (module, placed) in enumerate(zip(self.model.modules, program.layout.modules, strict=True)):
            chunks = program.chunks[index]
            tokens = sum_rows(chunks.offsets, module.lengths(program.shapes, chunks.members))
            remade = program.remade[index] if program.remade else None
            token_bytes = self._chunk_token_bytes(module, placed, chunks.replica, remade)
            scores = self._score_bytes(program, index)
            kept, extra = (
                (tokens[:, None] * per_token + more).ravel()
                for per_token, more in zip(token_bytes, scores, strict=True)
            )
            forward, backward, weight = program.spans(index)
            again = np.zeros_like(kept)
            if placed.recompute_whole:
                # Input, output and later the output's gradient stay; the backward recomputes the rest.
                projected = sum_rows(chunks.offsets, program.shapes.item_llm_tokens[chunks.members])
                parts = np.array([self.framework.sequence_parts(module, cp) for _, cp in placed.degrees])
                given = tokens * (module.layers[0].input_bytes_per_token / BF16_BYTES)
                given = given / parts[placed.degree_of_copy[chunks.replica]]
                ends = (given + projected * self.model.llm.config.hidden_size) * (self.element_bytes * self.reserved)
                again = np.maximum(kept - ends, 0.0)
                kept = ends
            change[forward] = kept + handed.held[forward]
            change[backward] = -kept - handed.held[backward]
            if program.splits_backward(index):
                widths = range(len(placed.degrees))
                per_token = np.stack([self.weight_token_bytes(module, placed.at(index)) for index in widths])
                left = (tokens[:, None] * per_token[placed.degree_of_copy[chunks.replica]]).ravel()
                change[backward] += left
                change[weight] = -left
            # A forward's input is kept, a backward's is the gradient of its output.
            working[forward] = extra + handed.sent[forward]
            # Nothing runs on stages without backward.
            shares = [kind.backward_share for kind in module.kinds]
            runs = np.tile((module.kind_counts(placed.layers_per_stage) * shares).any(axis=1), len(chunks))
            working[backward] = (extra + again) * runs + handed.sent[backward] + handed.received[backward]
            if placed.scatters:
                whole, with_gradients = gathered_bytes(module, placed, self.element_bytes, self.gradient_bytes)
                working[forward] += whole * self.reserved
                working[backward] += with_gradients * self.reserved * runs
            steps = np.flatnonzero((program.kind == Pass.OPTIMIZER) & (program.module == index))
            working[steps] = self.optimizer_bytes(module, placed)[program.stage[steps]]
        return change, working

    def _score_bytes(self, program: Program, index: int) -> tuple[FloatArray, FloatArray]:
        """Scores of unfused attention on a rank: kept, and while a pass runs ``[chunks, stages]``; else zeros."""
        module = program.model.modules[index]
        placed = program.layout.modules[index]
        chunks = program.chunks[index]
        kernel = self.framework.attention_kernel or (self.device and self.device.attention_kernel)
        if kernel != UNFUSED:
            return np.zeros((1, 1)), np.zeros((1, 1))
        counts = module.kind_counts(placed.layers_per_stage)
        lengths = module.lengths(program.shapes, chunks.members)
        again = counts * [kind.recomputed and kind.remade is None for kind in module.kinds] * placed.recomputes_layers
        if program.remade and not placed.recompute:
            whole = np.array([kind.remade is None for kind in module.kinds])
            again = remade_kinds(module, placed.layers_per_stage, program.remade[index]) * whole
        split = np.array([tp * self.framework.sequence_parts(module, cp) for tp, cp in placed.degrees])
        parts = split[placed.degree_of_copy[chunks.replica]]
        kept, working = (np.zeros((len(chunks), placed.pp)) for _ in range(2))
        for number, kind in enumerate(module.kinds):
            if kind.attention is None:
                continue
            attention = kind.attention
            area = sum_rows(chunks.offsets, score_area(attention, lengths, UNFUSED))
            matrix = area * (self.reserved * self.element_bytes * attention.query_width / attention.head_dim) / parts
            stays = (counts[:, number] - again[..., number]) * (kind.backward_share > 0)
            kept += matrix[:, None] * stays
            running = 2.0 * (counts[:, number] > 0) + (again[..., number] > 0)
            working = np.maximum(working, matrix[:, None] * running)
        return kept, working

    def over_program(self, program: Program) -> FloatArray:
        """Memory of a rank during and after each entry of ``lane_actions``, its states included ``[2, entries]``.

        Activations count from the start of forward to the end of backward, and receive buffers from their posting.
        """
        handed = self.transfers(program)
        change, working = self.action_bytes(program, handed)
        action = program.lane_actions
        lane = rows_of(program.lane_offsets)
        posted = np.concatenate(([0.0], np.cumsum(handed.received[action])))
        here = 1 + np.arange(len(action))
        ahead = np.minimum(here + self.framework.receives_ahead, program.lane_offsets[1:][lane])
        buffers = posted[ahead] - posted[here]
        running = np.cumsum(change[action])
        before = np.concatenate(([0.0], running))[program.lane_offsets[:-1]]
        away = np.zeros(len(action) + 1)
        for window in self._offload_windows(program):
            state_bytes = BF16_BYTES * window.parameters + self.gradient_bytes * window.learning
            away[window.last_forward + 1] += state_bytes
            away[window.first_backward] -= state_bytes
        after = running + (self.lane_state_bytes(program.layout) - before)[lane] - np.cumsum(away)[:-1] + buffers
        kind = program.kind[action]
        frees = (kind == Pass.BACKWARD) | (kind == Pass.WEIGHT)
        during = np.where(frees, np.maximum(after - change[action], after), after) + working[action]
        return np.stack([during, after])

    def peak_bytes(self, program: Program) -> FloatArray:
        """Highest memory of a rank of each lane ``[lanes]``."""
        return np.maximum.reduceat(self.over_program(program)[0], program.lane_offsets[:-1])


def _per_stage(module: ModuleSpec, placed: ModuleLayout, per_kind: list[int]) -> FloatArray:
    parameters = matmul(module.kind_counts(placed.layers_per_stage), per_kind)
    if module.config.tied_embeddings and placed.is_closed:
        parameters[-1] -= per_kind[0]
    return parameters
