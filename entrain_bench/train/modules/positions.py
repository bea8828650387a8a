"""Positions of tokens: rotations in one, two or three dimensions, and sinusoids."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.module_layers import RopeScaling

_SINUSOID_TIMESCALE = 10_000.0  # arXiv:1706.03762, Sec. 3.5


def on_grid(module: ModuleSpec) -> bool:
    """Whether tokens are patches of pictures, whose rotary positions are two-dimensional."""
    return module.is_encoder and "audio" not in module.config.modalities


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of the rotary angles of a rank's tokens, each ``[tokens, 1, 1, head_dim / 2]``."""

    cosine: Tensor
    sine: Tensor

    @classmethod
    def by(cls, angles: Tensor, dtype: torch.dtype) -> Rotation:
        """The rotation by angles ``[tokens, head_dim / 2]``."""
        angles = angles[:, None, None, :]
        return cls(angles.cos().to(dtype), angles.sin().to(dtype))

    def apply(self, rows: Tensor) -> Tensor:
        """Rotate ``[tokens, 1, heads, head_dim]``: the first half of the features with the second."""
        rotated: Tensor = _Rotate.apply(rows, self.cosine, self.sine)  # type: ignore[no-untyped-call]
        return rotated


class _Rotate(torch.autograd.Function):
    """One operator, which keeps the shared cosines and sines alone for backward."""

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


def rotary_angles(positions: Tensor, module: ModuleSpec) -> Tensor:
    """Angles of an LLM's rotary positions ``[tokens, head_dim / 2]``, float32 (arXiv:2104.09864).

    ``positions`` are ``[tokens]``, or time, height and width ``[3, tokens]``, of which the module's ``mrope_sections``
    name the one that each frequency turns with (arXiv:2409.12191, Sec. 2.1).
    """
    config = module.config
    scaling = RopeScaling.of(config.rope_scaling)
    frequencies = rotary_frequencies(config.head_dim // 2, config.rope_theta, scaling, positions.device)
    if positions.dim() == 1:
        return positions[:, None] * frequencies
    time, height, _ = config.mrope_sections or (len(frequencies), 0, 0)
    # By comparisons, for repetitions would wait for their numbers.
    place = torch.arange(len(frequencies), device=positions.device)
    turning = (place >= time).long() + (place >= time + height)
    return positions[turning].T * frequencies


def grid_rotary_angles(rows: Tensor, columns: Tensor, module: ModuleSpec) -> Tensor:
    """Angles of two-dimensional rotary positions ``[tokens, head_dim / 2]``, float32.

    The first half of the frequencies turns with the row, the second with the column (Qwen2.5-VL, arXiv:2502.13923).
    """
    config = module.config
    frequencies = rotary_frequencies(config.head_dim // 4, config.rope_theta, None, rows.device)
    return torch.cat([places[:, None] * frequencies for places in (rows, columns)], dim=-1)


def rotary_frequencies(count: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """Radians that each of ``count`` pairs of features turns by a position ``[count]``, float32."""
    frequencies = 1.0 / theta ** (torch.arange(count, device=device) / count)
    if scaling is None:
        return frequencies
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    turns = frequencies * scaling.original_context_tokens / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


@dataclass(frozen=True, slots=True)
class Picture:
    """The grid of LLM tokens of a picture, or of a video; ``tokens`` is their number if the last row is not full."""

    rows: int
    columns: int
    frames: int = 1
    frame_step: float = 1.0
    tokens: int | None = None


def multimodal_positions(parts: Sequence[int | Picture]) -> Tensor:
    """Time, height and width of a sample's LLM tokens ``[3, tokens]``, int64, on the CPU.

    Each of a number of text tokens is one further in all three. The tokens of a picture or a video have their places on
    its grid, from there on; the next part begins behind the grid's longer side, whatever a video's length, as Hugging
    Face's ``Qwen2_5_VLModel.get_rope_index`` (transformers 5.23) counts.
    """
    positions = []
    start = 0
    for part in parts:
        if isinstance(part, int):
            positions.append((torch.arange(part) + start).expand(3, -1))
            start += part
            continue
        time = (torch.arange(part.frames) * part.frame_step).long()
        grid = torch.meshgrid(time, torch.arange(part.rows), torch.arange(part.columns), indexing="ij")
        positions.append(torch.stack(grid).flatten(1)[:, : part.tokens] + start)
        start += max(part.rows, part.columns)
    return torch.cat(positions, dim=1)


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Fixed sinusoidal positions ``[tokens, width]``, float32, sines before cosines (Whisper, arXiv:2212.04356)."""
    half = width // 2
    step = math.log(_SINUSOID_TIMESCALE) / max(1, half - 1)
    angles = positions[:, None] * torch.exp(-step * torch.arange(half, device=positions.device))
    return torch.cat([angles.sin(), angles.cos()], dim=1)
