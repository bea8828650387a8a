"""Images as published processors cut and count them: pure functions of a model's ``ImageRules``.

Arithmetic follows the processors of Hugging Face transformers 5 operation by operation, so that counts are equal where
a quotient is whole but for its last digit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from entrain_bench.base.arrays import BoolArray, FloatArray, IntArray
from entrain_bench.specs.shapes import Items
from entrain_bench.specs.tokens import (
    AnyResolution,
    FixedSize,
    ImageRules,
    LongestEdge,
    NativeSize,
    NearestGrid,
    PaddedGrid,
    Resampled,
)

from .budget import ask_items

# An image whose unpadded grid has up to this square of the limit keeps its resolution (LLaVA-OneVision).
SLACK = 1.1
# No processor of Idefics3 makes a side larger, in pixels.
MAX_SIDE = 4096
# Tokens that Phi-4-multimodal adds to the patches of an image: the overview's 16 x 16 and its lines' ends, a separator.
OVERVIEW_TOKENS = 256 + 16 + 1


@dataclass(frozen=True, slots=True)
class _Images:
    """Images with sides in whole pixels ``[images]``; ``alone``: whether each is the only one of its sample."""

    widths: IntArray
    heights: IntArray
    alone: BoolArray

    def all(self, value: int) -> IntArray:
        """The same number for every image."""
        return np.full(len(self.widths), value, np.int64)


@dataclass(frozen=True, slots=True)
class _Cut:
    """Tiles of each image, encoder tokens of each of its tiles and LLM tokens of the whole image ``[images]`` each."""

    tiles: IntArray
    encoder_tokens: IntArray
    llm_tokens: IntArray


def processed_images(counts: IntArray, widths: FloatArray, heights: FloatArray, rules: ImageRules) -> Items:
    """Images as items, one per tile, with the tokens that a processor gives them.

    Args:
        counts: images of each sample ``[samples]``.
        widths: in pixels ``[images]``.
        heights: in pixels ``[images]``.
        rules: of the model.
    """
    wide, high = (np.maximum(1, np.rint(sides)).astype(np.int64) for sides in (widths, heights))
    cut = _METHODS[type(rules)](rules, _Images(wide, high, np.repeat(counts == 1, counts)))
    return tiled_items(counts, cut.tiles, cut.encoder_tokens, cut.llm_tokens)


def tiled_items(counts: IntArray, tiles: IntArray, encoder_tokens: IntArray, llm_tokens: IntArray) -> Items:
    """Return an item per tile; LLM tokens of an image are spread evenly over its tiles, at least one each.

    Args:
        counts: images of each sample ``[samples]``.
        tiles: tiles of each image ``[images]``.
        encoder_tokens: of each of an image's tiles ``[images]``.
        llm_tokens: of each whole image ``[images]``.
    """
    ask_items(tiles)
    owner = np.repeat(np.arange(len(counts)), counts)
    of_sample = np.bincount(owner, weights=tiles, minlength=len(counts)).astype(np.int64)
    place = np.arange(int(tiles.sum())) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    share, rest = np.divmod(np.repeat(llm_tokens, tiles), np.repeat(tiles, tiles))
    llm = np.maximum(1, share + (place < rest)).astype(np.int64)
    return Items(of_sample, np.repeat(encoder_tokens, tiles), llm)


def _fixed_size(rules: FixedSize, images: _Images) -> _Cut:
    return _Cut(images.all(1), images.all(rules.encoder_tokens), images.all(rules.llm_tokens))


def _any_resolution(rules: AnyResolution, images: _Images) -> _Cut:
    rows, columns = _best_grids(rules, images)
    side = rules.side
    down = rows * side
    across = columns * side
    wide = images.widths / images.heights > across / down
    by_width = np.floor(np.round(images.heights * (across / images.widths), 7)).astype(np.int64)
    by_height = np.floor(np.round(images.widths * (down / images.heights), 7)).astype(np.int64)
    down = np.where(wide, down - (down - by_width) // 2 * 2, down)
    across = np.where(wide, across, across - (across - by_height) // 2 * 2)
    if rules.max_tiles:
        times = np.sqrt(down * across / (rules.max_tiles * side**2))
        shrunk = times > SLACK
        down = np.where(shrunk, down // times, down).astype(np.int64)
        across = np.where(shrunk, across // times, across).astype(np.int64)
    tiles = rows * columns + 1
    llm = down * (across + 1) + rules.overview_tokens
    if rules.single_only:
        # Several images of a sample: one tile each, and a marker.
        tiles = np.where(images.alone, tiles, 1)
        llm = np.where(images.alone, llm, rules.overview_tokens + 1)
    return _Cut(tiles, images.all(rules.encoder_tokens), llm)


def _best_grids(rules: AnyResolution, images: _Images) -> tuple[IntArray, IntArray]:
    """Rows and columns of the grid that keeps most pixels of each image, then wastes fewest ``[images]`` each."""
    area = images.widths * images.heights
    most = images.all(0)
    least = images.all(np.iinfo(np.int64).max)
    rows = images.all(rules.grids[0][0])
    columns = images.all(rules.grids[0][1])
    for row, column in rules.grids:
        height = row * rules.pixels
        width = column * rules.pixels
        scale = np.minimum(width / images.widths, height / images.heights)
        fitted = np.floor(images.widths * scale) * np.floor(images.heights * scale)
        kept = np.minimum(fitted.astype(np.int64), area)
        wasted = width * height - kept
        better = (kept > most) | ((kept == most) & (wasted < least))
        most = np.where(better, kept, most)
        least = np.where(better, wasted, least)
        rows = np.where(better, row, rows)
        columns = np.where(better, column, columns)
    return rows, columns


def _nearest_grid(rules: NearestGrid, images: _Images) -> _Cut:
    columns, rows = closest_grids(images.widths, images.heights, rules.pixels, rules.max_tiles)
    # A grid of one tile is its own overview.
    tiles = columns * rows + (columns * rows > 1)
    return _Cut(tiles, images.all(rules.encoder_tokens), tiles * rules.llm_tokens + rules.markers)


def closest_grids(widths: IntArray, heights: IntArray, pixels: int, most: int) -> tuple[IntArray, IntArray]:
    """Columns and rows of the grid of at most ``most`` tiles whose aspect ratio is nearest ``[images]`` each.

    Grids are tried from the smallest, of as many tiles those with fewer columns first; of equally near ones a later one
    is taken by images of more than half its pixels.

    Args:
        widths: in whole pixels ``[images]``.
        heights: in whole pixels ``[images]``.
        pixels: side of a tile.
        most: tiles of a grid at most.
    """
    ratio = widths / heights
    area = widths * heights
    nearest = np.full(len(widths), np.inf)
    columns = np.ones(len(widths), np.int64)
    rows = np.ones(len(widths), np.int64)
    sides = range(1, most + 1)
    grids = [(column, row) for column in sides for row in sides if column * row <= most]
    for column, row in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        away = np.abs(ratio - column / row)
        large = area > 0.5 * pixels * pixels * column * row
        taken = (away < nearest) | ((away == nearest) & large)
        nearest = np.where(taken, away, nearest)
        columns = np.where(taken, column, columns)
        rows = np.where(taken, row, rows)
    return columns, rows


def _longest_edge(rules: LongestEdge, images: _Images) -> _Cut:
    height, width = _scaled_to(images, rules.longest_edge)
    rows = -(-height // rules.pixels)
    columns = -(-width // rules.pixels)
    cut = rows * columns > 1
    # A tile has two markers and a line one; the overview, or an image that is not cut, has three.
    lines = rows * (columns * (rules.llm_tokens + 2) + 1)
    llm = rules.llm_tokens + 3 + np.where(cut, lines, 0)
    return _Cut(np.where(cut, rows * columns + 1, 1), images.all(rules.encoder_tokens), llm)


def _scaled_to(images: _Images, longest_edge: int) -> tuple[IntArray, IntArray]:
    """Heights and widths with the longer side as given, the shorter one even ``[images]`` each."""
    ratio = images.widths / images.heights
    wide = images.widths >= images.heights
    short = np.where(wide, np.floor(longest_edge / ratio), np.floor(longest_edge * ratio)).astype(np.int64)
    short = np.maximum(short + short % 2, 1)
    height = np.where(wide, short, longest_edge)
    width = np.where(wide, longest_edge, short)
    if longest_edge > MAX_SIDE:
        ratio = width / height
        short = np.where(wide, np.floor(MAX_SIDE / ratio), np.floor(MAX_SIDE * ratio)).astype(np.int64)
        short = np.maximum(short, 1)
        height = np.where(wide, short, MAX_SIDE)
        width = np.where(wide, MAX_SIDE, short)
    return height, width


def _native_size(rules: NativeSize, images: _Images) -> _Cut:
    times = np.maximum(images.heights / rules.longest_edge, images.widths / rules.longest_edge)
    smaller = times > 1
    height = np.where(smaller, np.floor(images.heights / times), images.heights).astype(np.int64)
    width = np.where(smaller, np.floor(images.widths / times), images.widths).astype(np.int64)
    rows, columns = (np.maximum(1, -(-sides // rules.pixels)) for sides in (height, width))
    return _Cut(images.all(1), rows * columns * rules.merge**2, rows * (columns + 1))


def _resampled(rules: Resampled, images: _Images) -> _Cut:
    whole = _patches_between(rules, images.widths, images.heights)
    if not rules.quarters:
        # A marker on each side.
        return _Cut(images.all(1), whole, images.all(rules.llm_tokens + 2))
    quarter = _patches_between(rules, np.maximum(1, images.widths // 2), np.maximum(1, images.heights // 2))
    # Quarters and the whole image as tiles of equal length, with a marker between any two and at both ends.
    return _Cut(images.all(5), -(-(4 * quarter + whole) // 5), images.all(5 * rules.llm_tokens + 6))


def _patches_between(rules: Resampled, widths: IntArray, heights: IntArray) -> IntArray:
    """Patches of images whose sides are resized between two edges ``[images]``."""
    ratio = widths / heights
    most = rules.longest_edge
    wide = (widths >= heights) & (widths > most)
    tall = (heights > widths) & (heights > most)
    width = np.where(wide, most, np.where(tall, np.floor(most * ratio), widths)).astype(np.int64)
    height = np.where(tall, most, np.where(wide, np.floor(most / ratio), heights)).astype(np.int64)
    down, across = (np.maximum(sides, rules.shortest_edge) // rules.pixels for sides in (height, width))
    return np.asarray(np.maximum(1, down) * np.maximum(1, across))


def _padded_grid(rules: PaddedGrid, images: _Images) -> _Cut:
    pixels = rules.pixels
    patch = rules.patch_pixels
    columns = -(-images.widths // pixels)
    rows = -(-images.heights // pixels)
    closest = closest_grids(images.widths, images.heights, pixels, rules.max_tiles)
    too_many = columns * rows > rules.max_tiles
    columns, rows = (np.where(too_many, other, own) for own, other in zip((columns, rows), closest, strict=True))
    width = columns * pixels
    height = rows * pixels
    by_width = width / images.widths
    by_height = height / images.heights
    narrow = by_width < by_height
    free_below = np.where(narrow, height - np.floor(images.heights * by_width).astype(np.int64), 0)
    free_right = np.where(narrow, 0, width - np.floor(images.widths * by_height).astype(np.int64))
    side = pixels // patch
    # Every second patch of every tile's lines and columns stands for an LLM token.
    down = _every_second(rows * side - free_below // patch, side)
    across = _every_second(columns * side - free_right // patch, side)
    return _Cut(columns * rows + 1, images.all(side**2), down * across + down + OVERVIEW_TOKENS)


def _every_second(kept: IntArray, side: int) -> IntArray:
    """How many of the first patches along tiles of ``side`` patches are at an even place of their tile ``[images]``."""
    whole, rest = np.divmod(kept, side)
    return np.asarray(whole * (-(-side // 2)) + (rest + 1) // 2)


# What each kind of rule does; each function takes rules of its kind.
_METHODS: Mapping[type, Callable[[Any, _Images], _Cut]] = {
    FixedSize: _fixed_size,
    AnyResolution: _any_resolution,
    NearestGrid: _nearest_grid,
    LongestEdge: _longest_edge,
    NativeSize: _native_size,
    Resampled: _resampled,
    PaddedGrid: _padded_grid,
}
