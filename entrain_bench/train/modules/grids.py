"""Pictures as grids of patches: rows, columns, and the order in which windows of the picture follow each other.

Qwen2.5-VL (arXiv:2502.13923, section 2.1.1) attends within squares of a picture. Tokens arrive block by block (those
that become one LLM token are next to each other) and row by row of blocks; the first stage puts the blocks of a window
next to each other, so that every window is a run of tokens, and the projector undoes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from entrain_bench.base.errors import IncompatibleError
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.train.modules.packing import Pack, places_in
from entrain_bench.train.modules.positions import on_grid


@dataclass(frozen=True, slots=True, eq=False)
class Arrangement:
    """The tokens of a pack in the order of its stages; on the CPU.

    Attributes:
        order: token of the pack at each place ``[tokens]``.
        place: place of each token of the pack ``[tokens]``.
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
        grids: rows and columns of tokens of each picture; if unknown, (0, 0) or none at all, the blocks of a picture
            fill rows of ceil(sqrt(blocks)).
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
