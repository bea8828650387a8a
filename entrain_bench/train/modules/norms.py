"""Normalisation of hidden states that keeps its input for backward, and nothing else of that size."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import layer_norm, rms_norm


class Norm(torch.nn.Module):
    """LayerNorm or RMSNorm as the configuration says; megatron-core's own torch norms refuse sequence parallelism."""

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
        normed: Tensor = _RmsNorm.apply(hidden, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return normed


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
        normed, wide = hidden.float() * inverse, gradient.float()
        of_weight = (wide * normed).flatten(0, -2).sum(0).to(weight.dtype)
        scaled = wide * weight.float()
        of_hidden = inverse * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
        return of_hidden.to(hidden.dtype), of_weight, None
