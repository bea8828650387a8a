"""Positions of tokens: rotary angles in one, two or three dimensions, and sinusoids."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.numerics import RopeScaling

_SINUSOID_TIMESCALE = 10_000.0  # arXiv:1706.03762, Sec. 3.5


def on_grid(module: ModuleSpec) -> bool:
    """Whether tokens are patches of pictures, whose rotary positions are two-dimensional."""
    return module.is_encoder and "audio" not in module.config.modalities


def rotary_angles(positions: Tensor, module: ModuleSpec) -> Tensor:
    """Angles of an LLM's rotary positions, float32 (arXiv:2104.09864; in three dimensions arXiv:2409.12191, Sec. 2.1).

    Args:
        positions: ``[tokens]``, or time, height and width ``[3, tokens]``.
        module: whose ``mrope_sections`` say which frequencies turn with which of the three.

    Returns:
        ``[tokens, 1, 1, head_dim]``, both halves alike.
    """
    config = module.config
    scaling = RopeScaling.of(config.rope_scaling)
    frequencies = rotary_frequencies(config.head_dim // 2, config.rope_theta, scaling, positions.device)
    if positions.dim() == 1:
        return _twice(positions[:, None] * frequencies)
    time, height, _ = config.mrope_sections or (len(frequencies), 0, 0)
    # By comparisons, for repetitions would wait for their numbers.
    place = torch.arange(len(frequencies), device=positions.device)
    turning = (place >= time).long() + (place >= time + height)
    return _twice(positions[turning].T * frequencies)


def grid_rotary_angles(rows: Tensor, columns: Tensor, module: ModuleSpec) -> Tensor:
    """Angles of two-dimensional rotary positions ``[tokens, 1, 1, head_dim]``, float32.

    The first half of the frequencies turns with the row, the second with the column (Qwen2.5-VL, arXiv:2502.13923).
    """
    config = module.config
    frequencies = rotary_frequencies(config.head_dim // 4, config.rope_theta, None, rows.device)
    return _twice(torch.cat([places[:, None] * frequencies for places in (rows, columns)], dim=-1))


def rotary_frequencies(count: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """Radians that each of ``count`` pairs of features turns by a position ``[count]``, float32."""
    frequencies = 1.0 / theta ** (torch.arange(count, device=device) / count)
    if scaling is None:
        return frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = frequencies * scaling.original_context_tokens / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


@dataclass(frozen=True, slots=True)
class Picture:
    """The LLM tokens of a picture, or of a video.

    Attributes:
        rows, columns: of its grid of LLM tokens.
        frames: of a video; 1 for a picture.
        frame_step: time from one frame to the next.
        tokens: how many there are, if the last row is not full.
    """

    rows: int
    columns: int
    frames: int = 1
    frame_step: float = 1.0
    tokens: int | None = None


def multimodal_positions(parts: Sequence[int | Picture]) -> Tensor:
    """Time, height and width of a sample's LLM tokens ``[3, tokens]``, int64, on the CPU.

    A text token is one further in all three than what came before it. The tokens of a picture or a video have their
    places on its grid, from there on; what follows begins behind the grid's longer side, whatever a video's length, as
    Hugging Face's ``Qwen2_5_VLModel.get_rope_index`` (transformers 5.23) counts.

    Args:
        parts: in order; a number is one of text tokens.
    """
    found, start = [], 0
    for part in parts:
        if isinstance(part, int):
            found.append((torch.arange(part) + start).expand(3, -1))
            start += part
            continue
        time = (torch.arange(part.frames) * part.frame_step).long()
        grid = torch.meshgrid(time, torch.arange(part.rows), torch.arange(part.columns), indexing="ij")
        found.append(torch.stack(grid).flatten(1)[:, : part.tokens] + start)
        start += max(part.rows, part.columns)
    return torch.cat(found, dim=1)


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Fixed sinusoidal positions ``[tokens, width]``, float32, sines before cosines (Whisper, arXiv:2212.04356)."""
    half = width // 2
    step = math.log(_SINUSOID_TIMESCALE) / max(1, half - 1)
    angles = positions[:, None] * torch.exp(-step * torch.arange(half, device=positions.device))
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def _twice(angles: Tensor) -> Tensor:
    return torch.cat([angles, angles], dim=-1)[:, None, None, :]
