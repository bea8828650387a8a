"""Layers as the cost model sees them: matrix products, attention, elementwise traffic, parameters, activations."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from entrain_bench.base.arrays import FloatArray, IntArray

BF16_BYTES = 2
FP32_BYTES = 4
# Labelled positions whose logits exist at a time, where a head has those of labelled positions only.
LOGIT_CHUNK_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Gemm:
    """A product ``[tokens * rows_per_token, k] @ [k, n]``; tensor parallelism splits k (row parallel) or n (column).

    A convolution uses each input value ``taps`` times (kernel size / stride, squared), so a row reads k / taps.
    """

    k: int
    n: int
    row_parallel: bool = False
    rows_per_token: float = 1.0
    taps: float = 1.0

    def flops(self, tokens: FloatArray) -> FloatArray:
        """FLOPs of the forward product (one multiply-add is two)."""
        return 2.0 * self.k * self.n * self.rows_per_token * tokens


@dataclass(frozen=True, slots=True)
class Attention:
    """Scaled dot-product attention inside each sequence, or inside windows of ``window_tokens`` of it.

    A token stands for ``rows_per_token`` queries. With ``context_tokens`` keys and values are a context's of that
    length, not the sequence's own (cross-attention). ``head_dim`` decides how fast it is.
    """

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


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a module, before any parallelism.

    Attributes:
        kind: layers of the same kind of a module are identical, but for ``hidden_size`` in a U-Net.
        elementwise_bytes_per_token: device memory read and written outside matrix products and attention (forward).
        backward_elementwise_bytes_per_token: the same in backward; None: twice as many.
        num_gathers: column-parallel products, the first among ``gemms``, that need the hidden states of all tokens.
        num_scatters: results of hidden size that tensor parallelism sums over its ranks.
        gathered_width: values of a token that tensor-parallel ranks gather from the layer's products. Each rank then
            holds and moves all fp32, transient and cast bytes and all elementwise bytes that are not hidden states.
        hidden_size: width of what the next layer is handed for a token; in a U-Net pending skip connections included.
        activation_bytes_per_token: what forward keeps for backward.
        input_bytes_per_token: the layer's input alone, kept when activations are recomputed.
        tensor_parallel: if false, the ranks of a tensor-parallel group hold all of the layer and share out its
            sequences (fractions of one included).
        replicated_elementwise_bytes_per_token, replicated_bytes_per_token: parts of the elementwise and of the kept
            bytes that tensor parallelism divides only with sequence parallelism: hidden states.
        whole_bytes_per_token: part of the kept bytes that every rank of a tensor-parallel group holds.
        fp32_bytes_per_token: part of the kept bytes that is fp32 whatever the model's element type.
        transient_bytes_per_token: what exists besides while the layer runs; tensor parallelism divides it.
        cast_bytes_per_token: likewise, but only in a model that is not fp32 itself: what is cast to fp32 or from it.
        recomputed: whether recomputation covers the layer; megatron-core recomputes blocks, not the ends.
        labelled: what the layer does for labelled tokens only, which always runs again in backward.
        remade: what recomputation covers of the layer; None: all of it.
        learns: whether it has weight gradients and optimizer states.
        backward_share: products of its backward relative to those for both gradients: 0.5 for that of its input alone,
            0 for a layer without backward.
    """

    kind: str
    gemms: tuple[Gemm, ...] = ()
    attention: Attention | None = None
    elementwise_bytes_per_token: float = 0.0
    num_elementwise_kernels: int = 0
    backward_elementwise_bytes_per_token: float | None = None
    num_gathers: int = 0
    num_scatters: int = 0
    gathered_width: int = 0
    hidden_size: int = 0
    parameters: int = 0
    activation_bytes_per_token: float = 0.0
    input_bytes_per_token: float = 0.0
    tensor_parallel: bool = True
    replicated_elementwise_bytes_per_token: float = 0.0
    replicated_bytes_per_token: float = 0.0
    whole_bytes_per_token: float = 0.0
    fp32_bytes_per_token: float = 0.0
    transient_bytes_per_token: float = 0.0
    cast_bytes_per_token: float = 0.0
    recomputed: bool = True
    remade: Layer | None = None
    labelled: Layer | None = None
    learns: bool = True
    backward_share: float = 1.0

    @property
    def remade_share(self) -> float:
        """Products that recomputation runs once more, relative to those of the forward; 0 where nothing needs them."""
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
        still = replace(
            self,
            remade=self.remade and self.remade.frozen(passes_gradients) if passes_gradients else None,
            labelled=self.labelled and self.labelled.frozen(passes_gradients),
            learns=False,
            backward_share=0.5 * passes_gradients,
        )
        if passes_gradients:
            return still
        return replace(
            still,
            activation_bytes_per_token=0.0,
            input_bytes_per_token=0.0,
            replicated_bytes_per_token=0.0,
            whole_bytes_per_token=0.0,
            fp32_bytes_per_token=0.0,
        )

    def unneeded_flops(self, lengths: IntArray) -> FloatArray:
        """Of three times the FLOPs of a forward, those that a frozen layer has no need of, per sequence."""
        if self.backward_share > 0:
            return 2.0 * (1.0 - self.backward_share) * replace(self, attention=None).forward_flops(lengths)
        return 2.0 * self.forward_flops(lengths)

    def forward_flops(self, lengths: IntArray) -> FloatArray:
        """Model FLOPs of a forward for sequences of the given lengths; a backward takes twice as many."""
        tokens = np.asarray(lengths, np.float64)
        attention = self.attention.flops(lengths) if self.attention else np.zeros_like(tokens)
        return sum((gemm.flops(tokens) for gemm in self.gemms), start=attention)

    def kept_bytes(self, tp: int, sequence_parallel: bool, element_bytes: int = BF16_BYTES) -> float:
        """Bytes a token leaves for backward on a rank of ``tp``, without context parallelism."""
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
        """Ranks among which tensor parallelism of ``tp`` divides what follows the layer's products."""
        return 1 if self.gathered_width else tp

    def weight_pass_bytes(self, tp: int, element_bytes: int = BF16_BYTES) -> float:
        """Bytes of a token that gradients of weights are made of, on a rank of ``tp``, without context parallelism.

        Each product keeps its gathered input and the gradient of its output between the two passes (Transformer
        Engine's ``WeightGradStore``, NVIDIA/TransformerEngine#1653). Tensor parallelism divides the outputs of
        column-parallel products and the inputs of row-parallel ones.
        """
        if not self.learns:
            return 0.0
        total = 0.0
        for gemm in (*self.gemms, *(self.labelled.gemms if self.labelled else ())):
            inside, outside = (gemm.k / gemm.taps, gemm.n) if gemm.row_parallel else (gemm.n, gemm.k / gemm.taps)
            total += gemm.rows_per_token * (inside / tp + outside / (1 if self.tensor_parallel else tp))
        return total * element_bytes

    def recomputed_bytes(self, tp: int, sequence_parallel: bool, element_bytes: int = BF16_BYTES) -> float:
        """Of the kept bytes, those that recomputation brings back, on a rank of ``tp``, without context parallelism."""
        if not self.recomputed:
            return 0.0
        return (self.remade or self).kept_bytes(tp, sequence_parallel, element_bytes)

    def held_bytes(self, tp: int, sequence_parallel: bool, element_bytes: int = BF16_BYTES) -> float:
        """Bytes a token leaves for backward with recomputation, on a rank of ``tp``, without context parallelism."""
        kept = self.kept_bytes(tp, sequence_parallel, element_bytes)
        if not self.recomputed:
            return kept
        if self.remade is not None:
            return kept - self.remade.kept_bytes(tp, sequence_parallel, element_bytes)
        split = tp if sequence_parallel or not self.tensor_parallel else 1
        return self.input_bytes_per_token * element_bytes / BF16_BYTES / split

    def working_bytes(self, tp: int, element_bytes: int = BF16_BYTES) -> float:
        """Bytes a token needs besides on a rank of ``tp`` while the layer runs, without context parallelism."""
        cast = self.cast_bytes_per_token if element_bytes < FP32_BYTES else 0.0
        return (self.transient_bytes_per_token * element_bytes / BF16_BYTES + cast) / self.split_parts(tp)

    def logit_bytes(self, tp: int, element_bytes: int = BF16_BYTES) -> float:
        """Bytes of the logits of a labelled head that exist at a time on a rank of ``tp``; 0 for other layers."""
        if self.labelled is None:
            return 0.0
        kept = self.labelled.kept_bytes(tp, False, element_bytes) + self.labelled.working_bytes(tp, element_bytes)
        return LOGIT_CHUNK_TOKENS * kept

    def split_by_label(self) -> Layer:
        """An LLM's head whose logits and loss are of labelled tokens only; its norm is of all tokens.

        It keeps the norm's input of all tokens and its output of those that have a label, here as if all had one.
        """
        norm = self.replicated_elementwise_bytes_per_token
        back = self.backward_elementwise_bytes_per_token
        logits = replace(
            self,
            kind="logits",
            elementwise_bytes_per_token=self.elementwise_bytes_per_token - norm,
            num_elementwise_kernels=self.num_elementwise_kernels - 1,
            backward_elementwise_bytes_per_token=back and back - 2 * norm,
            parameters=0,
            activation_bytes_per_token=self.activation_bytes_per_token - self.replicated_bytes_per_token,
            input_bytes_per_token=0.0,
            replicated_elementwise_bytes_per_token=0.0,
            replicated_bytes_per_token=0.0,
        )
        return replace(
            self,
            gemms=(),
            elementwise_bytes_per_token=norm,
            num_elementwise_kernels=1,
            backward_elementwise_bytes_per_token=back and 2 * norm,
            gathered_width=0,
            activation_bytes_per_token=self.replicated_bytes_per_token,
            whole_bytes_per_token=0.0,
            fp32_bytes_per_token=0.0,
            cast_bytes_per_token=0.0,
            labelled=logits,
        )
