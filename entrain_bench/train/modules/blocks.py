"""Transformer blocks: megatron-core's layers, with packed attention as their core, and norms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec as LayerPart
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import gelu, layer_norm, relu, rms_norm, silu
from torch.utils.checkpoint import checkpoint

from entrain_bench.base.errors import IncompatibleError
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.module_layers import find_activation
from entrain_bench.train.modules.attention import AttentionKernel, PackedAttention
from entrain_bench.train.modules.packing import StageGroups
from entrain_bench.train.modules.split import ColumnProduct, RowProduct

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "squared_relu": lambda rows: relu(rows).square(),
}


def transformer_config(
    module: ModuleSpec, tp: int, dtype: torch.dtype, *, sequence_parallel: bool = False
) -> TransformerConfig:
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
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # Parameters are allocated on the device in force and filled by ``initialise``.
        use_cpu_initialization=True,
        perform_initialization=False,
        # A gated activation unfused keeps two results more; GELU's fused form is another function.
        bias_activation_fusion=config.gated_mlp,
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
        """Normalise the last dimension."""
        if self.bias is not None:
            return layer_norm(hidden, self.weight.shape, self.weight, self.bias, self.eps)
        if hidden.device.type != "cpu":
            return rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        return _RmsNorm.apply(hidden, self.weight, self.eps)  # type: ignore[no-untyped-call, no-any-return]


class _RmsNorm(torch.autograd.Function):
    """As torch's kernel for GPUs; what torch runs on a CPU keeps the normalised rows as well."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = hidden.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(hidden, weight, inverse)
        return (wide * inverse).to(hidden.dtype) * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = gradients
        hidden, weight, inverse = ctx.saved_tensors
        normed = hidden.float() * inverse
        wide = gradient.float()
        of_weight = (wide * normed).flatten(0, -2).sum(0).to(weight.dtype)
        scaled = wide * weight.float()
        of_hidden = inverse * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
        return of_hidden.to(hidden.dtype), of_weight, None


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
        submodules=SelfAttentionSubmodules(ColumnProduct, partial(PackedAttention, kernel=kernel), RowProduct),
    )
    parts = TransformerLayerSubmodules(
        input_layernorm=Norm,
        self_attention=attention,
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=Norm,
        mlp=partial(MLP.as_mlp_submodule, submodules=MLPSubmodules(ColumnProduct, RowProduct)),
        mlp_bda=get_bias_dropout_add,
    )
    collection = ProcessGroupCollection(tp=groups.tp, cp=groups.cp)
    return Block(config, parts, layer_number=index, pg_collection=collection, add_layer_offset=False)
