"""Layers as the cost model sees them: matrix products, attention, elementwise traffic, parameters, activations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import numpy as np

from entrain_bench.base.arrays import FloatArray, IntArray

BF16_BYTES = 2
FP32_BYTES = 4


# Expected greatest of 1, 2, 4, ... standard normal numbers (H. L. Harter, Biometrika 48, 1961, table 1; those beyond 64
# by numerical integration).
GREATEST_OF_NORMALS = (0.0, 0.5642, 1.0294, 1.4236, 1.7660, 2.0697, 2.3437, 2.5946, 2.8269, 3.0439, 3.2484)


@dataclass(frozen=True, slots=True)
class Gemm:
    """A product ``[tokens * rows_per_token, k] @ [k, n]``; a convolution uses each input value ``taps`` times.

    A grouped product has ``groups`` weight matrices, those of experts, among which its rows are divided.
    """

    k: int
    n: int
    row_parallel: bool = False
    rows_per_token: float = 1.0
    taps: float = 1.0
    groups: int = 1
    adapter: bool = False  # of a low-rank adapter, which is trained in a frozen layer

    def flops(self, tokens: FloatArray) -> FloatArray:
        """FLOPs of the forward product (one multiply-add is two)."""
        return 2.0 * self.k * self.n * self.rows_per_token * tokens


@dataclass(frozen=True, slots=True)
class Attention:
    """Scaled dot-product attention inside each sequence or its windows, or to a context (cross-attention)."""

    query_width: int
    key_value_width: int
    causal: bool
    window_tokens: int = 0
    rows_per_token: float = 1.0
    context_tokens: int = 0
    head_dim: int = 128

    def flops(self, lengths: IntArray) -> FloatArray:
        """FLOPs of scores and weighted sum in forward for sequences of the given lengths; causal masks halve them."""
        queries = np.asarray(lengths, np.float64) * self.rows_per_token
        span = np.minimum(queries, self.window_tokens) if self.window_tokens else queries
        return 4.0 * self.query_width * queries * (self.context_tokens or span) * (0.5 if self.causal else 1.0)


# Fields of the bytes that a layer keeps for its backward.
KEPT_BYTES = [f"{what}_bytes_per_token" for what in ("activation", "input", "replicated", "whole", "fp32")]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a module, before any parallelism; bytes are of a bf16 model unless they are fp32 in any model."""

    kind: str  # layers of a kind are identical, except ``hidden_size`` in a U-Net
    gemms: tuple[Gemm, ...] = ()
    attention: Attention | None = None
    elementwise_bytes_per_token: float = 0.0  # moved outside products and attention in forward
    num_elementwise_kernels: int = 0
    backward_elementwise_bytes_per_token: float | None = None  # None: twice as many
    whole_elementwise_bytes_per_token: float = 0.0  # more of them, which every rank of a group moves
    num_gathers: int = 0  # column-parallel products, the first ones, that need the hidden states of all tokens
    num_scatters: int = 0  # results of hidden size that tensor parallelism sums over its ranks
    # Values of a token that tensor-parallel ranks gather from its products. Each rank then holds and moves all fp32,
    # transient and cast bytes and all elementwise bytes that are not hidden states.
    gathered_width: int = 0
    hidden_size: int = 0  # width that the next layer is handed; in a U-Net with pending skip connections
    parameters: int = 0
    expert_parameters: int = 0  # of the parameters, those that expert parallelism divides
    idle_parameters: float = 0.0  # of the experts' parameters, those that a token does not use
    expert_copies: int = 0  # experts that each token is sent to; 0 for a layer without experts
    num_experts: int = 0
    expert_load_std: float = 0.0  # standard deviation of an expert's tokens, relative to their mean
    activation_bytes_per_token: float = 0.0  # kept by forward for backward
    input_bytes_per_token: float = 0.0  # the layer's input, kept when activations are recomputed
    tensor_parallel: bool = True  # false: the ranks of a group hold all of it, and share out its sequences
    # Hidden states among elementwise and kept bytes; only sequence parallelism divides them.
    replicated_elementwise_bytes_per_token: float = 0.0
    replicated_bytes_per_token: float = 0.0
    whole_bytes_per_token: float = 0.0  # part of the kept bytes that every rank of a group holds
    fp32_bytes_per_token: float = 0.0  # part of the kept bytes that is fp32 in any model
    transient_bytes_per_token: float = 0.0  # while the layer runs; tensor parallelism divides it
    cast_bytes_per_token: float = 0.0  # likewise, of casts to fp32 or from it, in other models
    recomputed: bool = True  # recomputation covers it; megatron-core recomputes blocks, not the ends
    remade: Layer | None = None  # part of the layer that recomputation covers; None: all of it
    learns: bool = True  # has weight gradients and optimizer states
    # Product FLOPs of its backward, relative to both gradients: 0.5 for its input's alone, more with adapters.
    backward_share: float = 1.0
    adapter_parameters: int = 0  # of the parameters of a frozen layer, those that are trained
    expert_adapter_parameters: int = 0  # of these, those of experts

    @property
    def trained_parameters(self) -> int:
        """Parameters with gradients and optimizer states."""
        return self.parameters if self.learns else self.adapter_parameters

    @property
    def trained_expert_parameters(self) -> int:
        """Those of experts among them."""
        return self.expert_parameters if self.learns else self.expert_adapter_parameters

    @property
    def trains(self) -> bool:
        """Whether it has weight gradients: of its own weights, or of adapters."""
        return self.learns or self.adapter_parameters > 0

    @property
    def adapters(self) -> list[Gemm]:
        """Products of adapters."""
        return [gemm for gemm in self.gemms if gemm.adapter]

    @property
    def remade_share(self) -> float:
        """Return recomputed product FLOPs relative to the forward's; 0 if no backward needs them."""
        if not self.recomputed or not self.backward_share:
            return 0.0
        if self.remade is None:
            return 1.0
        again, whole = (sum(gemm.k * gemm.n * gemm.rows_per_token for gemm in x.gemms) for x in (self.remade, self))
        return again / whole

    @property
    def remade_from_bytes_per_token(self) -> float:
        """Bytes per token that a forward keeps for the backward if the layer is recomputed."""
        if self.remade is None:
            return self.input_bytes_per_token
        return self.activation_bytes_per_token - self.remade.activation_bytes_per_token

    def frozen(self, passes_gradients: bool) -> Layer:
        """The layer with fixed weights; if nothing before it learns, it has no backward and keeps nothing for one."""
        if passes_gradients:
            remade = self.remade and self.remade.frozen(passes_gradients)
            return replace(self, remade=remade, learns=False, backward_share=0.5)
        nothing: dict[str, Any] = dict.fromkeys(KEPT_BYTES, 0.0)
        return replace(self, remade=None, learns=False, backward_share=0.0, **nothing)

    def busiest_experts(self, ep: int) -> float:
        """Tokens of the busiest of ``ep`` ranks relative to the mean, for independent normal loads of experts.

        The mean load of a rank's experts varies by ``expert_load_std`` over the root of their number.
        """
        std = self.expert_load_std * sqrt(ep / max(self.num_experts, 1))
        return 1.0 + std * GREATEST_OF_NORMALS[min((ep - 1).bit_length(), len(GREATEST_OF_NORMALS) - 1)]

    def balanced(self) -> Layer:
        """The layer with equal loads of its experts."""
        return replace(self, remade=self.remade and self.remade.balanced(), expert_load_std=0.0)

    def learning_as(self, other: Layer) -> Layer:
        """Return the layer, frozen if the other layer is frozen."""
        return self if other.learns else self.frozen(passes_gradients=other.backward_share > 0)

    def unneeded_flops(self, lengths: IntArray) -> FloatArray:
        """Return the FLOPs per sequence that a frozen layer saves of three times a forward's."""
        if self.backward_share > 0:
            return 2.0 * (1.0 - self.backward_share) * replace(self, attention=None).forward_flops(lengths)
        return 2.0 * self.forward_flops(lengths)

    def forward_flops(self, lengths: IntArray) -> FloatArray:
        """Model FLOPs of a forward for sequences of the given lengths; a backward takes twice as many."""
        tokens = np.asarray(lengths, np.float64)
        attention = self.attention.flops(lengths) if self.attention else np.zeros_like(tokens)
        return sum((gemm.flops(tokens) for gemm in self.gemms), start=attention)

    def kept_bytes(self, tp: int, sequence_parallel: bool, element_bytes: int = BF16_BYTES) -> float:
        """Return the bytes per token kept for backward on a rank of ``tp``, without context parallelism."""
        scale = element_bytes / BF16_BYTES
        if not self.tensor_parallel:
            return self.activation_bytes_per_token * scale / tp
        shared = 1 if sequence_parallel else tp
        whole = self.whole_bytes_per_token
        replicated = self.replicated_bytes_per_token
        fp32 = self.fp32_bytes_per_token
        split = self.activation_bytes_per_token - whole - replicated - fp32
        return (scale * (whole * tp + replicated * shared + split) + fp32 * tp / self.split_parts(tp)) / tp

    def split_parts(self, tp: int) -> int:
        """Return the number of ranks among which tensor parallelism of ``tp`` divides the outputs of products."""
        return 1 if self.gathered_width else tp

    def weight_pass_bytes(self, tp: int, element_bytes: int = BF16_BYTES) -> float:
        """Return the bytes per token that a weight pass reads: inputs and output gradients (TransformerEngine#1653)."""
        total = 0.0
        for gemm in self.gemms if self.learns else self.adapters:
            inside, outside = (gemm.k / gemm.taps, gemm.n) if gemm.row_parallel else (gemm.n, gemm.k / gemm.taps)
            total += gemm.rows_per_token * (inside / tp + outside / (1 if self.tensor_parallel else tp))
        return total * element_bytes

    def recomputed_bytes(self, tp: int, sequence_parallel: bool, element_bytes: int = BF16_BYTES) -> float:
        """Return the bytes per token that recomputation restores on a rank of ``tp``, without context parallelism."""
        if not self.recomputed:
            return 0.0
        return (self.remade or self).kept_bytes(tp, sequence_parallel, element_bytes)

    def held_bytes(self, tp: int, sequence_parallel: bool, element_bytes: int = BF16_BYTES) -> float:
        """Return the bytes per token kept on a rank of ``tp`` with recomputation, without context parallelism."""
        if self.recomputed and self.remade is None:
            split = tp if sequence_parallel or not self.tensor_parallel else 1
            return self.input_bytes_per_token * element_bytes / BF16_BYTES / split
        again = self.recomputed_bytes(tp, sequence_parallel, element_bytes)
        return self.kept_bytes(tp, sequence_parallel, element_bytes) - again

    def working_bytes(self, tp: int, element_bytes: int = BF16_BYTES) -> float:
        """Return the temporary bytes per token on a rank of ``tp`` during a pass, without context parallelism."""
        cast = self.cast_bytes_per_token if element_bytes < FP32_BYTES else 0.0
        return (self.transient_bytes_per_token * element_bytes / BF16_BYTES + cast) / self.split_parts(tp)
