"""Positions of tokens: rotations, sinusoids, and pictures as grids of patches, whose windows follow each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from entrain_bench.base.errors import IncompatibleError
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.module_layers import RopeScaling
from entrain_bench.train.modules.packing import Pack, places_in

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

    ``positions`` are ``[tokens]``, or time, height and width ``[3, tokens]`` for ``mrope_sections`` (arXiv:2409.12191).
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
    """Angles ``[tokens, head_dim / 2]``, float32; half turn with the row, half with the column (arXiv:2502.13923)."""
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

    As Hugging Face's ``Qwen2_5_VLModel.get_rope_index`` (transformers 5.23) counts; numbers are of text tokens.
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


@dataclass(frozen=True, slots=True, eq=False)
class Arrangement:
    """The tokens of a pack in the order of its stages; on the CPU.

    Attributes:
        order, place: token of the pack at each place, and its inverse ``[tokens]``.
        rows, columns: of the token at each place ``[tokens]``.
        windows: tokens of each window, in order.
    """

    order: Tensor
    place: Tensor
    rows: Tensor
    columns: Tensor
    windows: tuple[int, ...]


@lru_cache(maxsize=64)
def arrange(
    lengths: tuple[int, ...], grids: tuple[tuple[int, int], ...], merge_tokens: int, window_tokens: int
) -> Arrangement:
    """The order of a pack's tokens.

    Args:
        lengths: tokens of each picture.
        grids: rows and columns of each picture; if unknown, (0, 0) or none, blocks fill rows of ceil(sqrt(blocks)).
        merge_tokens: tokens of a block.
        window_tokens: tokens of a whole window, a square of blocks; 0 for none.
    """
    sizes = torch.tensor(lengths)
    side = _side(merge_tokens)
    blocks = (sizes + merge_tokens - 1) // merge_tokens
    wide = blocks.double().sqrt().ceil().long()
    if grids:
        known = torch.tensor([columns // side for _, columns in grids])
        wide = torch.where(known > 0, known, wide)
    item, within = places_in(sizes)
    block = within // merge_tokens
    inside = within % merge_tokens
    block_row = block // wide[item]
    block_column = block % wide[item]
    rows = block_row * side + inside // side
    columns = block_column * side + inside % side
    if not window_tokens:
        natural = torch.arange(len(item))
        return Arrangement(natural, natural, rows, columns, ())
    span = math.isqrt(window_tokens) // side
    windows_wide = -(-wide // span)
    windows_high = -(-blocks // (wide * span))
    first = ((windows_wide * windows_high).cumsum(0) - windows_wide * windows_high)[item]
    window = first + block_row // span * windows_wide[item] + block_column // span
    order = torch.sort(window, stable=True).indices
    _, counts = torch.unique_consecutive(window[order], return_counts=True)
    return Arrangement(order, torch.argsort(order, stable=True), rows[order], columns[order], tuple(counts.tolist()))


def arrangement_of(module: ModuleSpec, pack: Pack) -> Arrangement | None:
    """The order of a pack's tokens in a module's stages; None where nothing depends on places in a picture."""
    config = module.config
    if not on_grid(module) or not (config.rotary or config.window_tokens):
        return None
    merged = merge_tokens(module)
    if odd := [grid for grid in pack.grids if any(size % _side(merged) for size in grid)]:
        size = "{} x {}".format(*odd[0])
        raise IncompatibleError(
            f"model.modules.{module.name}: cannot merge an image of {size} patches in squares of {merged} patches"
        )
    return arrange(pack.lengths, pack.grids, merged, config.window_tokens)


def in_stage_order(module: ModuleSpec, pack: Pack, features: Tensor) -> Tensor:
    """Features ``[sum(lengths), input_width]`` in the order in which a module's first stage takes them; on the CPU."""
    arrangement = arrangement_of(module, pack)
    if arrangement is None or not arrangement.windows:
        return features
    ordered = torch.empty_like(features, pin_memory=features.is_pinned())
    return torch.index_select(features, 0, arrangement.order, out=ordered)


def check_windows(module: ModuleSpec) -> None:
    """Raise ``IncompatibleError`` for windows of a picture that are no squares of whole blocks."""
    merged = merge_tokens(module)
    window = module.config.window_tokens
    side = _side(merged)
    if window and (math.isqrt(window) ** 2 != window or math.isqrt(window) % side):
        raise IncompatibleError(
            f"model.modules.{module.name}.window_tokens={window}: must be the square of a multiple of {side}, "
            f"the side of the {merged} patches that become an LLM token"
        )


def merge_tokens(module: ModuleSpec) -> int:
    """Consecutive encoder tokens that become one LLM token."""
    rows = module.layers[-1].gemms[-1].rows_per_token
    if (merge := round(1 / rows)) < 1 or not math.isclose(merge * rows, 1):
        raise IncompatibleError(
            f"model.modules.{module.name}.head_gemms: the last rows_per_token={rows} must be 1 / an integer"
        )
    return merge


def _side(merge_tokens: int) -> int:
    return math.ceil(math.sqrt(merge_tokens))
