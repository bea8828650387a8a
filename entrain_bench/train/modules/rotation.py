"""Rotary positions applied in one operator, which keeps the shared cosines and sines alone for backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of the rotary angles of a rank's tokens, each ``[tokens, 1, 1, head_dim / 2]``."""

    cosine: Tensor
    sine: Tensor

    def apply(self, rows: Tensor) -> Tensor:
        """Rotate ``[tokens, 1, heads, head_dim]``: the first half of the features with the second."""
        rotated: Tensor = _Rotate.apply(rows, self.cosine, self.sine)  # type: ignore[no-untyped-call]
        return rotated


def rotation_of(angles: Tensor, dtype: torch.dtype) -> Rotation:
    """The rotation by angles ``[tokens, 1, 1, head_dim]`` whose halves are equal."""
    half = angles.chunk(2, dim=-1)[0]
    return Rotation(half.cos().to(dtype), half.sin().to(dtype))


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _rotated(rows, cosine, sine)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return _rotated(gradients[0], cosine, -sine), None, None


def _rotated(rows: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = rows.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
