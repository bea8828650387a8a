"""Transformer blocks: megatron-core's layers, with packed attention as their core."""

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
from torch.nn.functional import gelu, relu, silu
from torch.utils.checkpoint import checkpoint

from entrain_bench.base.errors import IncompatibleError
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.numerics import activation_of
from entrain_bench.train.modules.attention import AttentionKernel, PackedAttention
from entrain_bench.train.modules.norms import Norm
from entrain_bench.train.modules.packing import StageGroups
from entrain_bench.train.modules.split import ColumnProduct, RowProduct


def _squared_relu(rows: Tensor) -> Tensor:
    return relu(rows).square()


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "squared_relu": _squared_relu,
}


def transformer_config(
    module: ModuleSpec, tp: int, dtype: torch.dtype, *, sequence_parallel: bool = False
) -> TransformerConfig:
    """megatron-core's description of a module's blocks; no dropout, fused kernels where they keep less for backward.

    Raises:
        IncompatibleError: for biases and activations that megatron-core's layers do not offer.
    """
    config = module.config
    if config.linear_bias and not config.qkv_bias:
        raise IncompatibleError(f"model.modules.{module.name}: linear_bias needs qkv_bias to train")
    if config.gated_mlp and activation_of(config) != "silu":
        raise IncompatibleError(
            f"model.modules.{module.name}.activation={config.activation}: gated blocks train with silu"
        )
    return TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        num_query_groups=config.num_kv_heads,
        kv_channels=config.head_dim,
        ffn_hidden_size=config.ffn_hidden_size,
        gated_linear_unit=config.gated_mlp,
        activation_func=_ACTIVATIONS[activation_of(config)],
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
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        # A gated activation unfused keeps two results more; GELU's fused form is another function.
        bias_activation_fusion=config.gated_mlp,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
    )


class Block(TransformerLayer):  # type: ignore[misc]
    """megatron-core's layer, which may run its MLP, with the norm before it, again in backward.

    Its own ``recompute_modules=["mlp"]`` needs the states of a GPU's random generators, and keeps the norm's result.

    Attributes:
        remakes_mlp: whether the next forward keeps the MLP's input only.
    """

    remakes_mlp: bool = False

    def _forward_mlp(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        run = partial(super()._forward_mlp, **options)
        if not self.remakes_mlp:
            return run(hidden_states, *args)
        return checkpoint(run, hidden_states, *args, use_reentrant=False, preserve_rng_state=False)


def transformer_block(
    module: ModuleSpec, index: int, config: TransformerConfig, groups: StageGroups, kernel: AttentionKernel
) -> Block:
    """Block ``index`` (from 1) of a module; causal in the LLM."""
    causal = not module.is_encoder
    attention = LayerPart(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal if causal else AttnMaskType.no_mask},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnProduct,
            core_attention=partial(PackedAttention, kernel=kernel),
            linear_proj=RowProduct,
        ),
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
