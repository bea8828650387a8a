"""Positions of tokens: rotary angles in one or two dimensions, and sinusoids."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from entrain_bench.specs.model import ModuleSpec

_LLM_THETA = 500_000.0  # Llama 3, arXiv:2407.21783, Sec. 3.2
_VISION_THETA = 10_000.0  # Qwen2.5-VL, Hugging Face modeling_qwen2_5_vl.py, read 2026-11
_SINUSOID_TIMESCALE = 10_000.0  # arXiv:1706.03762, Sec. 3.5


def on_grid(module: ModuleSpec) -> bool:
    """Whether rotary positions are two-dimensional: in encoders of pictures."""
    return module.is_encoder and "audio" not in module.config.modalities


def rotary_angles(positions: Tensor, head_dim: int) -> Tensor:
    """Angles of one-dimensional rotary positions ``[tokens, 1, 1, head_dim]``, float32 (arXiv:2104.09864)."""
    return _twice(_angles(positions, head_dim // 2, _LLM_THETA))


def grid_rotary_angles(rows: Tensor, columns: Tensor, head_dim: int) -> Tensor:
    """Angles of two-dimensional rotary positions ``[tokens, 1, 1, head_dim]``, float32.

    The first half of the frequencies turns with the row, the second with the column (Qwen2.5-VL, arXiv:2502.13923).
    """
    halves = [_angles(places, head_dim // 4, _VISION_THETA) for places in (rows, columns)]
    return _twice(torch.cat(halves, dim=-1))


def grid_places(positions: Tensor, lengths: Tensor, merge_tokens: int) -> tuple[Tensor, Tensor]:
    """Row and column of tokens on a near-square grid, each ``[tokens]``.

    Shapes carry no height and width, so an item's blocks of ``merge_tokens`` tokens fill rows of ceil(sqrt(blocks));
    the tokens of a block are next to each other, as in Qwen2.5-VL.

    Args:
        positions: place of each token in its item.
        lengths: tokens of each token's item.
        merge_tokens: consecutive tokens that become one LLM token.
    """
    side = math.ceil(math.sqrt(merge_tokens))
    blocks = (lengths + merge_tokens - 1) // merge_tokens
    wide = blocks.double().sqrt().ceil().long()
    block, inside = positions // merge_tokens, positions % merge_tokens
    return block // wide * side + inside // side, block % wide * side + inside % side


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Fixed sinusoidal positions ``[tokens, width]``, float32, sines before cosines (Whisper, arXiv:2212.04356)."""
    half = width // 2
    step = math.log(_SINUSOID_TIMESCALE) / max(1, half - 1)
    angles = positions[:, None] * torch.exp(-step * torch.arange(half, device=positions.device))
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def _angles(places: Tensor, count: int, theta: float) -> Tensor:
    inverse = theta ** (-torch.arange(count, device=places.device) / count)
    return places[:, None] * inverse


def _twice(angles: Tensor) -> Tensor:
    return torch.cat([angles, angles], dim=-1)[:, None, None, :]
