"""Transformer blocks: megatron-core's layers, with attention of packed sequences as their core."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec as LayerPart
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor
from torch.nn import Parameter
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import gelu, layer_norm, relu, rms_norm, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

from entrain_bench.base.errors import IncompatibleError
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.module_layers import find_activation
from entrain_bench.train.modules.experts import block_groups, expert_layer, expert_options
from entrain_bench.train.modules.packing import Rotation, Segments, Shares, StageGroups
from entrain_bench.train.modules.split import ColumnProduct, RowProduct


class AttentionKernel(StrEnum):
    """torch's attention with one call a length, on a CPU computed again in backward, and its variable-length one."""

    CPU = "cpu"
    SDPA = "sdpa"
    FLASH2 = "flash2"


# Inputs that torch's variable-length kernel takes: messages of torch 2.13 (libtorch_cuda), read 2026-11.
FLASH_HEAD_DIMS = range(8, 257, 8)
LEAST_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class Mask:
    """The mask argument that megatron-core passes to a layer's attention."""

    segments: Segments
    shares: Shares
    rotation: Rotation | None = None


class PackedAttention(torch.nn.Module):
    """Core attention of a megatron-core layer; its attention mask is a ``Mask``."""

    def __init__(
        self,
        *,
        attn_mask_type: AttnMaskType,
        kernel: AttentionKernel,
        **_: Any,
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.causal = attn_mask_type == AttnMaskType.causal

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, **_: Any) -> Tensor:
        """Attend, ``[tokens of this rank, 1, heads, head_dim]`` to ``[tokens of this rank, 1, heads * head_dim]``."""
        segments = mask.segments
        remade: AbstractContextManager[None] = nullcontext()
        if mask.rotation is not None:
            query = mask.rotation.apply(query)
            key = mask.rotation.apply(key)
        # Copies of their own: views would keep the product that queries, keys and values are cut out of.
        query = query.squeeze(1).contiguous()
        if mask.shares.cp.size() > 1:
            both = torch.cat([key, value], dim=-1)
            key, value = _gathered(both, mask)
            remade = _gathered_again(both.detach(), (key, value), mask)
        else:
            key, value = (rows.squeeze(1).contiguous() for rows in (key, value))
        with remade:
            output = packed_attention(query, key, value, segments, causal=self.causal, kernel=self.kernel)
        return output.reshape(len(query), 1, -1)


def _gathered(rows_here: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """Keys and values of all ranks, each ``[keys, heads, head_dim]``."""
    both = gather_from_sequence_parallel_region(rows_here, tensor_parallel_output_grad=True, group=mask.shares.cp)
    if mask.segments.keys is not None:
        both = both.index_select(0, mask.segments.keys)
    key, value = (rows.squeeze(1).contiguous() for rows in both.chunk(2, dim=-1))
    return key, value


@dataclass(frozen=True, slots=True)
class _Gathered:
    """Placeholder for keys (0) or values (1) of all ranks, which backward gathers again."""

    place: int


@contextmanager
def _gathered_again(both: Tensor, gathered: tuple[Tensor, Tensor], mask: Mask) -> Iterator[None]:
    """Have autograd keep this rank's keys and values only, as Megatron-Core's kernels do; backward gathers again."""
    # Hooks do not nest: those around, such as a checkpoint's, get all that is kept.
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False) or (lambda kept: kept,) * 2
    places = {rows.untyped_storage()._cdata: place for place, rows in enumerate(gathered) if len(rows)}
    held = pack(both)
    made = dict[int, Tensor]()

    def keep(tensor: Tensor) -> Any:
        place = places.get(tensor.untyped_storage()._cdata)
        return pack(tensor) if place is None else _Gathered(place)

    def take(kept: Any) -> Any:
        if not isinstance(kept, _Gathered):
            return unpack(kept)
        if kept.place not in made:
            made.update(enumerate(_gathered(unpack(held), mask)))
        return made.pop(kept.place)

    with torch.autograd.graph.saved_tensors_hooks(keep, take):
        yield


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, causal: bool, kernel: AttentionKernel
) -> Tensor:
    """Return scaled dot-product attention inside each segment, in the shape of ``query``.

    ``query`` is ``[sum(query_lengths), heads, head_dim]``; ``key`` and ``value`` are ``[sum(key_lengths), key-value
    heads, head_dim]``. A segment's queries are its last tokens; if ``causal``, each sees only keys up to itself.
    """
    output: Any
    if kernel is AttentionKernel.CPU:
        # Like a GPU's kernels, it keeps no copies in batches of a length.
        output = _recomputed(_by_length, query, key, value, segments, causal)
    elif kernel is AttentionKernel.SDPA:
        output = _by_length(query, key, value, segments, causal)
    else:
        output = varlen_attn(
            query,
            key,
            value,
            segments.query_offsets,
            segments.key_offsets,
            max(segments.query_lengths),
            max(segments.key_lengths),
            window_size=(-1, 0) if causal else (-1, -1),
            enable_gqa=query.shape[1] != key.shape[1],
        )
    assert isinstance(output, Tensor)
    return output


def _recomputed(function: Callable[..., Tensor], *args: Any) -> Any:
    """Call a function; autograd keeps its inputs alone, and backward calls it again."""
    if not any(isinstance(value, Tensor) and value.requires_grad for value in args):
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def _by_length(query: Tensor, key: Tensor, value: Tensor, segments: Segments, causal: bool) -> Tensor:
    # Not every backend of the operator takes fewer keys and values than queries.
    key, value = (rows.repeat_interleave(query.shape[1] // rows.shape[1], dim=1) for rows in (key, value))
    alike = defaultdict(list)
    for index, lengths in enumerate(zip(segments.query_lengths, segments.key_lengths, strict=True)):
        alike[lengths].append(index)
    sizes = (segments.query_lengths, segments.key_lengths, segments.key_lengths)
    parts = [torch.split(rows, list(lengths)) for rows, lengths in zip((query, key, value), sizes, strict=True)]
    outputs: dict[int, Tensor] = {}
    for members in alike.values():
        q, k, v = (torch.stack([rows[i] for i in members]).transpose(1, 2) for rows in parts)
        attended = scaled_dot_product_attention(q, k, v, **_causality(q, k, causal))
        outputs |= dict(zip(members, attended.transpose(1, 2), strict=True))
    return torch.cat([outputs[index] for index in range(len(outputs))])


def _causality(query: Tensor, key: Tensor, causal: bool) -> dict[str, Any]:
    num_queries = query.shape[2]
    num_keys = key.shape[2]
    if not causal or num_queries == num_keys:
        return {"is_causal": causal}
    hidden = query.new_full((num_queries, num_keys), -torch.inf).triu(1 + num_keys - num_queries)
    return {"is_causal": False, "attn_mask": hidden}


def kernel_for(module: ModuleSpec, dtype: torch.dtype, device: torch.device) -> AttentionKernel:
    """Return the kernel that computes a module's attention on a device."""
    if device.type == "cpu":
        return AttentionKernel.CPU
    fits = dtype is torch.bfloat16 and module.config.head_dim in FLASH_HEAD_DIMS
    able = fits and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY
    return AttentionKernel.FLASH2 if able else AttentionKernel.SDPA


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "squared_relu": lambda rows: relu(rows).square(),
}


def transformer_config(module: ModuleSpec, groups: StageGroups, dtype: torch.dtype) -> TransformerConfig:
    """megatron-core's description of a module's blocks; ``IncompatibleError`` for biases and activations it lacks."""
    config = module.config
    if config.linear_bias and not config.qkv_bias:
        where = f"model.modules.{module.name}.linear_bias=true"
        raise IncompatibleError(f"{where}: training needs qkv_bias=true with it")
    if config.gated_mlp and find_activation(config) != "silu":
        raise IncompatibleError(
            f"model.modules.{module.name}.activation={config.activation}: must be silu to train gated blocks"
        )
    return TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        num_query_groups=config.num_kv_heads,
        kv_channels=config.head_dim,
        ffn_hidden_size=config.ffn_hidden_size,
        gated_linear_unit=config.gated_mlp,
        activation_func=_ACTIVATIONS[find_activation(config)],
        add_bias_linear=config.linear_bias,
        add_qkv_bias=config.qkv_bias,
        normalization="LayerNorm" if config.norm_bias else "RMSNorm",
        layernorm_epsilon=config.norm_epsilon,
        qk_layernorm=config.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=groups.tp.size(),
        sequence_parallel=groups.splits_tokens,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # Parameters are allocated on the device in force and filled by ``initialise``.
        use_cpu_initialization=True,
        perform_initialization=False,
        # A gated activation unfused keeps two results more; GELU's fused form is another function.
        bias_activation_fusion=config.gated_mlp,
        **expert_options(module, groups),
    )


class Norm(torch.nn.Module):
    """LayerNorm or RMSNorm that keeps only its input for backward; megatron-core's refuse sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, **_: Any) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.weight = Parameter(torch.ones(hidden_size))
        self.bias = Parameter(torch.zeros(hidden_size)) if config.normalization == "LayerNorm" else None
        for parameter in self.parameters():
            # Ranks that hold different tokens each have a part of the gradient.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalize the last dimension."""
        if self.bias is not None:
            return layer_norm(hidden, self.weight.shape, self.weight, self.bias, self.eps)
        if hidden.device.type != "cpu":
            return rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        # torch's kernel for CPUs keeps the normalized rows as well.
        return _recomputed(rms_norm, hidden, self.weight.shape, self.weight, self.eps)  # type: ignore[no-any-return]


class HeadNorm(Norm):
    """The norm of queries or keys: each tensor parallel rank has other heads, and a part of the gradient."""

    def __init__(self, config: TransformerConfig, hidden_size: int, **options: Any) -> None:
        super().__init__(config, hidden_size, **options)
        for parameter in self.parameters():
            parameter.sequence_parallel = True  # type: ignore[attr-defined]


class Block(TransformerLayer):  # type: ignore[misc]
    """megatron-core's layer, which may run its MLP again in backward; its own way needs a GPU's random states."""

    remakes_mlp: bool = False  # whether the next forward keeps the MLP's input only

    def _forward_mlp(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        run = partial(super()._forward_mlp, **options)
        if not self.remakes_mlp:
            return run(hidden_states, *args)
        return checkpoint(run, hidden_states, *args, use_reentrant=False, preserve_rng_state=False)


def transformer_block(
    module: ModuleSpec, index: int, config: TransformerConfig, groups: StageGroups, kernel: AttentionKernel
) -> Block:
    """Block ``index`` (from 1) of a module; causal in the LLM."""
    attention = LayerPart(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.no_mask if module.is_encoder else AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            ColumnProduct,
            partial(PackedAttention, kernel=kernel),
            RowProduct,
            **dict.fromkeys(("q_layernorm", "k_layernorm"), HeadNorm if module.config.qk_norm else None),
        ),
    )
    mlp = partial(MLP.as_mlp_submodule, submodules=MLPSubmodules(ColumnProduct, RowProduct))
    parts = TransformerLayerSubmodules(
        input_layernorm=Norm,
        self_attention=attention,
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=Norm,
        mlp=expert_layer if module.layers[index].num_experts else mlp,
        mlp_bda=get_bias_dropout_add,
    )
    return Block(config, parts, layer_number=index, pg_collection=block_groups(groups), add_layer_offset=False)
