"""A stage: consecutive layers of one module on one rank, its first weights and its parameters by name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program.layout import check_tensor_parallel, check_words
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.train.device import to_device
from entrain_bench.train.modules.blocks import (
    AttentionKernel,
    Block,
    Mask,
    kernel_for,
    transformer_block,
    transformer_config,
)
from entrain_bench.train.modules.ends import EncoderEmbedding, LanguageHead, Projector, TokenEmbedding
from entrain_bench.train.modules.experts import check_trainable, global_name
from entrain_bench.train.modules.packing import (
    Arrangement,
    Pack,
    Rotation,
    Share,
    Shares,
    StageGroups,
    arrangement_of,
    check_windows,
    consecutive_windows,
    grid_rotary_angles,
    on_grid,
    positions_of,
    rotary_angles,
    segments_of,
    shares_of,
    sinusoids,
)
from entrain_bench.train.modules.split import ColumnProduct, RowProduct, Splitter, WeightPass

CPU = torch.device("cpu")
_WEIGHT_STD = 0.02  # GPT-2's, and megatron-core's default init_method_std


class Stage(torch.nn.Module):
    """Layers of a module: layer 0 embeds, the last projects (encoders) or gives the loss (LLM)."""

    def __init__(
        self,
        module: ModuleSpec,
        held: range,
        groups: StageGroups,
        *,
        dtype: torch.dtype,
        recompute: bool,
        attention: AttentionKernel,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.module = module
        self.held = held
        self.groups = groups
        self.recompute = recompute
        self.recompute_whole = False  # whether backward runs all layers again, of which forward keeps nothing
        self._is_first = held.start == 0
        self._is_last = held.stop == len(module.layers)
        self.config = transformer_config(module, groups, dtype)
        self.layers = torch.nn.ModuleDict({str(index): self._layer(index) for index in held})
        self.splitter = Splitter()
        for part in self.modules():
            if isinstance(part, (ColumnProduct, RowProduct, TokenEmbedding)):
                part.splitter = self.splitter
        self.to(dtype)
        for index in held:
            self.layers[str(index)].requires_grad_(module.layers[index].learns)
        if (copy := self.tied_embedding()) is not None and not (self._is_first and self._is_last):
            # megatron-core gives it a bucket, so both stages' ranks own equal parts, and counts one copy in norms.
            copy.shared_embedding = True  # type: ignore[attr-defined]
            copy.shared = not self._is_first  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor | None, pack: Pack, groups: StageGroups | None = None) -> Tensor:
        """Run the layers on a chunk that ``groups`` share (None: the stage's); returns states of this rank's tokens.

        ``hidden`` are such states too, or of a first stage features ``[sum(lengths), input_width]`` in stage order,
        projected tokens ``[projected tokens, hidden_size]``, or None for none. A last stage returns LLM tokens
        ``[sum(outputs), LLM hidden size]``, or the summed loss of this rank's labeled positions, a float32 scalar.
        """
        assert sum(pack.lengths) > 0, "empty chunk"
        self.splitter.on = pack.splits_backward
        if self.recompute_whole and self.module.layers[0].backward_share > 0 and torch.is_grad_enabled():
            inputs = hidden, pack, groups
            return checkpoint(self._run, *inputs, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]
        return self._run(hidden, pack, groups)

    def _run(self, hidden: Tensor | None, pack: Pack, groups: StageGroups | None) -> Tensor:
        shares = shares_of(pack.lengths, groups or self.groups)
        if self._is_first:
            hidden = self.layers["0"](hidden, pack, shares)
            if not self.module.config.rotary and not self.module.config.learned_positions:
                positions = to_device(positions_of(pack.lengths, shares.hidden), hidden.device)
                hidden = hidden + sinusoids(positions, hidden.shape[1]).to(hidden.dtype)
        assert hidden is not None
        arrangement = arrangement_of(self.module, pack)
        hidden = self._run_blocks(hidden, pack, shares, arrangement)
        if not self._is_last:
            return hidden
        head = self.layers[str(self.held[-1])]
        if isinstance(head, Projector):
            return head(hidden, pack, shares, arrangement)  # type: ignore[no-any-return]
        weight = self.tied_embedding() if self._is_first else None
        return head(hidden, pack, shares, weight)  # type: ignore[no-any-return]

    def backward_inputs(
        self, output: GradientEdge, gradient: Tensor, leaf: Tensor | None
    ) -> tuple[Tensor | None, WeightPass]:
        """The backward of a chunk whose pack splits it; returns the gradient of its input, and the weight pass."""
        learning = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return self.splitter.backward_inputs(output, gradient, leaf, learning)

    @property
    def passes_gradients(self) -> bool:
        """Whether anything before the stage wants the gradient of its input."""
        return passes_gradients(self.module, self.held)

    def tied_embedding(self) -> Parameter | None:
        """The vocabulary's weight that first and last stage share (each holds a copy), or None."""
        if not self.module.config.tied_embeddings or not (self._is_first or self._is_last):
            return None
        if self._is_first:
            return self.layers["0"].words.weight  # type: ignore[return-value, union-attr]
        return self.layers[str(self.held[-1])].logits.weight  # type: ignore[return-value, union-attr]

    def _layer(self, index: int) -> torch.nn.Module:
        module = self.module
        config = self.config
        groups = self.groups
        if 0 < index < len(module.layers) - 1:
            return transformer_block(module, index, config, groups, self.attention)
        if module.is_encoder:
            return EncoderEmbedding(module, config, groups) if index == 0 else Projector(module, config, groups)
        if index == 0:
            return TokenEmbedding(module, config, groups)
        own_weight = not (module.config.tied_embeddings and self._is_first)
        return LanguageHead(module, config, groups, own_weight=own_weight)

    def _run_blocks(self, hidden: Tensor, pack: Pack, shares: Shares, arrangement: Arrangement | None) -> Tensor:
        blocks = [index for index in self.held if 0 < index < len(self.module.layers) - 1]
        if not blocks:
            return hidden
        rotation = self._rotation(pack, shares.products, arrangement, hidden)
        masks: dict[int, Mask] = {}
        hidden = hidden.unsqueeze(1)
        for place, index in enumerate(blocks):
            block = self.layers[str(index)]
            layer = self.module.layers[index]
            assert isinstance(block, Block)
            assert layer.attention is not None
            window = layer.attention.window_tokens
            if window not in masks:
                runs: Sequence[int] = pack.lengths
                if window:
                    runs = arrangement.windows if arrangement else consecutive_windows(pack.lengths, window)
                causal = layer.attention.causal
                gathered = shares.cp.size() > 1
                segments = segments_of(runs, shares.products, causal=causal, device=hidden.device, gathered=gathered)
                masks[window] = Mask(segments, shares, rotation)
            again = (self.recompute or place < pack.remade) and layer.backward_share > 0 and torch.is_grad_enabled()
            block.remakes_mlp = again and layer.remade is not None
            inputs = (block, hidden, masks[window])
            if again and layer.remade is None:
                hidden = checkpoint(_run_block, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = _run_block(*inputs)
        return hidden.squeeze(1)

    def _rotation(self, pack: Pack, share: Share, arrangement: Arrangement | None, hidden: Tensor) -> Rotation | None:
        device = hidden.device
        if not self.module.config.rotary:
            return None
        if arrangement:
            places = torch.stack([share.pad(arrangement.rows), share.pad(arrangement.columns)])
            rows, columns = to_device(places, device)
            return Rotation.by(grid_rotary_angles(rows, columns, self.module), hidden.dtype)
        positions = positions_of(pack.lengths, share) if pack.positions is None else share.pad(pack.positions.T).T
        return Rotation.by(rotary_angles(to_device(positions, device), self.module), hidden.dtype)


def passes_gradients(module: ModuleSpec, held: range) -> bool:
    """Whether anything before a stage of some layers wants the gradient of its input."""
    if held.start == 0:
        return not module.is_encoder and module.layers[0].backward_share > 0
    return any(layer.backward_share > 0 for layer in module.layers[: held.start])


def _run_block(block: Block, hidden: Tensor, mask: Mask) -> Tensor:
    output, _ = block(hidden, attention_mask=mask)
    return output  # type: ignore[no-any-return]


def build_stage(
    model: ModelSpec,
    module: ModuleSpec,
    layers: range,
    groups: StageGroups,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: torch.device = CPU,
    recompute: bool = False,
) -> Stage:
    """Build and initialize a stage of the given layers; call ``prepare_platform`` before.

    ``IncompatibleError`` for an architecture that cannot be built, ``UserError`` if TP does not divide a width.
    """
    check_tensor_parallel(module, groups.tp.size())
    check_words(module, groups.tp.size())
    check_trainable(module, groups)
    config = module.config
    where = f"model.modules.{module.name}"
    llm_size = model.llm.config.hidden_size
    if module.is_encoder and module.layers[-1].gemms[-1].n != llm_size:
        raise IncompatibleError(f"{where}.head_gemms: the last must give the LLM's hidden_size={llm_size}")
    if on_grid(module):
        check_windows(module)
    unit = 4 if on_grid(module) else 2
    if config.rotary and config.head_dim % unit:
        raise IncompatibleError(f"{where}.head_dim={config.head_dim}: rotary positions need a multiple of {unit}")
    with torch.device(device):
        stage = Stage(
            module,
            layers,
            groups,
            dtype=dtype,
            recompute=recompute,
            attention=kernel_for(module, dtype, device),
        )
    initialise(stage, seed)
    return stage


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """This rank's shard of a parameter."""

    key: str  # ``module.layer.parameter``; both copies of a tied embedding have the input embedding's
    parameter: Parameter
    dim: int  # the dimension that tensor parallelism splits; -1 for none
    stride: int  # pieces of each shard; pieces of all ranks interleave (2 for gate and up of a gated MLP)
    tp: int
    tp_rank: int

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return tuple(size * self.tp if dim == self.dim else size for dim, size in enumerate(self.parameter.shape))

    def shard(self, full: Tensor) -> Tensor:
        """This rank's shard of a full tensor."""
        if self.dim < 0:
            return full
        pieces = full.chunk(self.stride * self.tp, self.dim)[self.tp_rank :: self.tp]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)


def named_parameters(stage: Stage) -> Iterator[NamedParameter]:
    """The parameters of a stage by key."""
    tied = stage.tied_embedding()
    tp = stage.groups.tp.size()
    tp_rank = stage.groups.tp.rank()
    count = stage.module.config.experts.count if stage.module.config.experts else 0
    for name, parameter in stage.named_parameters():
        key = "0.words.weight" if parameter is tied else global_name(name.removeprefix("layers."), stage.groups, count)
        # megatron-core marks the parameters that it splits, and they alone have these attributes.
        dim = getattr(parameter, "partition_dim", -1)
        stride = getattr(parameter, "partition_stride", 1)
        yield NamedParameter(f"{stage.module.name}.{key}", parameter, dim, stride, tp, tp_rank)


@torch.no_grad()
def initialise(stage: Stage, seed: int) -> None:
    """Set weights to normal numbers seeded by ``(seed, key)``, norms to 1 and biases to 0, in any layout."""
    for named in named_parameters(stage):
        parameter = named.parameter
        if parameter.dim() == 1:
            parameter.fill_(0.0 if named.key.endswith("bias") else 1.0)
            continue
        digest = hashlib.sha256(f"{seed}/{named.key}".encode()).digest()
        generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest[:7]))
        full = torch.empty(named.full_shape, device=parameter.device).normal_(0.0, _WEIGHT_STD, generator=generator)
        parameter.copy_(named.shard(full))


# A stage computed with more tensor parallel ranks than its weights are split over takes slices of each rank's weights.
# Gradients of all ranks are summed once; parameters that every rank uses whole count once, not once a rank.


@dataclass(frozen=True, slots=True)
class Slice:
    """A parameter ``name`` of ``owner`` in a sliced stage, a shard of ``holder``'s; ``copies`` ranks compute it."""

    owner: torch.nn.Module
    name: str
    named: NamedParameter
    holder: torch.nn.Module
    copies: int

    def take(self) -> None:
        """Slice the current weights; a view of them if possible."""
        whole = self.holder._parameters[self.name]
        assert whole is not None
        value = self.named.shard(whole)
        if self.copies > 1 and value.requires_grad:
            value = _CountedOnce.apply(value, self.copies)  # type: ignore[no-untyped-call]
        # Tensors replace parameters, as in ``torch.func.functional_call``.
        self.owner._parameters[self.name] = value  # type: ignore[assignment]


@dataclass(slots=True)
class SlicedStage:
    """A stage whose parameters are slices of another's, taken once an iteration."""

    stage: Stage
    slices: tuple[Slice, ...]
    is_fresh: bool = False

    def take(self) -> Stage:
        """Return the stage with slices of the weights at the first call since ``forget``."""
        for piece in () if self.is_fresh else self.slices:
            piece.take()
        self.is_fresh = True
        return self.stage

    def forget(self) -> None:
        """Make the next ``take`` slice again, because weights have changed."""
        self.is_fresh = False


def slice_stage(whole: Stage, groups: StageGroups) -> SlicedStage:
    """The stage for wider groups, without weights of its own."""
    with torch.device("meta"):
        stage = Stage(
            whole.module,
            whole.held,
            groups,
            dtype=whole.config.params_dtype,
            recompute=whole.recompute,
            attention=whole.attention,
        )
    stage.config.calculate_per_token_loss = True
    place = groups.tp.rank() // groups.weights_tp
    every = (replace(shard, tp=groups.slices, tp_rank=place) for shard in named_parameters(stage))
    named = {id(shard.parameter): shard for shard in every}
    holders = dict(whole.named_modules())
    parts = dict(stage.named_modules())
    slices = []
    for path, parameter in stage.named_parameters():
        owner, _, name = path.rpartition(".")
        partial = named[id(parameter)].dim >= 0 or getattr(parameter, "sequence_parallel", False)
        copies = 1 if partial else groups.slices
        slices.append(Slice(parts[owner], name, named[id(parameter)], holders[owner], copies))
    return SlicedStage(stage, tuple(slices))


def slice_stages(whole: Stage, widths: Mapping[int, StageGroups]) -> dict[int, SlicedStage]:
    """The stages of groups with a wider TP, by TP."""
    wider = {groups.tp.size(): groups for groups in widths.values() if groups.tp.size() != whole.groups.tp.size()}
    return {tp: slice_stage(whole, groups) for tp, groups in wider.items()}


class _CountedOnce(torch.autograd.Function):
    """The parameter; its gradient is divided among the ranks that compute it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, copies: int) -> Tensor:
        ctx.copies = copies
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient / ctx.copies, None
