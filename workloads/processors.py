"""Images as published processors cut and count them: pure functions of a model's ``ImageRules`` or ``TileRules``."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from entrain_bench.base.arrays import BoolArray, FloatArray, IntArray
from entrain_bench.specs.shapes import Items
from entrain_bench.specs.tokens import (
    AnyResolution,
    FixedSize,
    FrameRules,
    ImageRules,
    LongestEdge,
    NativeSize,
    NearestGrid,
    PaddedGrid,
    PaddedSize,
    Resampled,
    TileRules,
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
    """Images with sides in whole pixels ``[images]``; ``many``: how many their samples have ``[images]``."""

    widths: IntArray
    heights: IntArray
    many: IntArray

    @property
    def alone(self) -> BoolArray:
        """Whether each is the only one of its sample."""
        return np.equal(self.many, 1)


# Tiles of each image, encoder tokens of each of its tiles, LLM tokens of the image: one number or ``[images]`` each.
type _Cut = tuple[IntArray | int, IntArray | int, IntArray | int]


def processed_images(counts: IntArray, widths: FloatArray, heights: FloatArray, rules: ImageRules) -> Items:
    """Images as items, one per tile, with the tokens that a processor gives them.

    ``counts`` are images of each sample ``[samples]``; sides are in pixels ``[images]``. Arithmetic is that of Hugging
    Face transformers 5 operation by operation: counts are equal for any quotient.
    """
    wide, high = _whole_pixels(widths, heights)
    cut = _METHODS[type(rules)](rules, _Images(wide, high, np.repeat(counts, counts)))
    return tiled_items(counts, *(np.broadcast_to(part, wide.shape) for part in cut))


def _whole_pixels(widths: FloatArray, heights: FloatArray) -> tuple[IntArray, IntArray]:
    return np.maximum(1, np.rint(widths)).astype(np.int64), np.maximum(1, np.rint(heights)).astype(np.int64)


def tiled_items(counts: IntArray, tiles: IntArray, encoder_tokens: IntArray, llm_tokens: IntArray) -> Items:
    """Return an item per tile; LLM tokens of an image are spread evenly over its tiles, at least one each.

    ``counts`` are images by sample ``[samples]``; tiles, tokens per tile and LLM tokens are by image ``[images]``.
    """
    ask_items(tiles)
    owner = np.repeat(np.arange(len(counts)), counts)
    of_sample = np.bincount(owner, weights=tiles, minlength=len(counts)).astype(np.int64)
    place = np.arange(int(tiles.sum())) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    share, rest = np.divmod(np.repeat(llm_tokens, tiles), np.repeat(tiles, tiles))
    llm = np.maximum(1, share + (place < rest)).astype(np.int64)
    return Items(of_sample, np.repeat(encoder_tokens, tiles), llm)


def _any_resolution(rules: AnyResolution, images: _Images) -> _Cut:
    def fitted(width: int, height: int) -> IntArray:
        scale = np.minimum(width / images.widths, height / images.heights)
        return (np.floor(images.widths * scale) * np.floor(images.heights * scale)).astype(np.int64)

    grids = [(column, row) for row, column in rules.grids]
    columns, rows = _most_kept(images.widths, images.heights, grids, rules.pixels, fitted)
    down, across = _unpadded(images.widths, images.heights, columns, rows, rules.side, rules.max_tiles)
    tiles = rows * columns + 1
    llm = down * (across + 1) + rules.overview_tokens
    if rules.single_only:
        # Several images of a sample: one tile each, and a marker.
        tiles = np.where(images.alone, tiles, 1)
        llm = np.where(images.alone, llm, rules.overview_tokens + 1)
    return tiles, rules.encoder_tokens, llm


def _unpadded(
    widths: IntArray, heights: IntArray, columns: IntArray, rows: IntArray, side: int, most_tiles: int
) -> tuple[IntArray, IntArray]:
    """Lines and columns of LLM tokens of images on grids of tiles ``[images]`` each, padding cut off.

    More than ``most_tiles`` tiles (0: any number) are scaled down; ``side`` is that of a tile in tokens.
    """
    down = rows * side
    across = columns * side
    wide = widths * down > heights * across
    by_width = down - 2 * ((down - heights * across // widths) // 2)
    by_height = across - 2 * ((across - widths * down // heights) // 2)
    down = np.where(wide, by_width, down)
    across = np.where(wide, across, by_height)
    times = np.maximum(1, np.sqrt(across * down / ((most_tiles or np.inf) * side**2)))
    shrunk = times > SLACK
    # As in published code: a quotient just below a whole number is rounded down.
    down = np.where(shrunk, down // times, down).astype(np.int64)
    across = np.where(shrunk, across // times, across).astype(np.int64)
    return down, across


def _most_kept(
    widths: IntArray,
    heights: IntArray,
    grids: Iterable[tuple[int, int]],
    pixels: int,
    fitted: Callable[[int, int], IntArray],
) -> tuple[IntArray, IntArray]:
    """Columns and rows of the first grid that keeps most pixels of each image, then wastes fewest ``[images]`` each.

    ``fitted`` returns the pixels of the images scaled to fit a width and a height ``[images]``.
    """
    most = np.full(len(widths), -1)
    least = np.zeros(len(widths), np.int64)
    columns = np.ones(len(widths), np.int64)
    rows = np.ones(len(widths), np.int64)
    for column, row in grids:
        width = column * pixels
        height = row * pixels
        kept = np.minimum(fitted(width, height), widths * heights)
        wasted = width * height - kept
        better = (kept > most) | ((kept == most) & (wasted < least))
        most = np.where(better, kept, most)
        least = np.where(better, wasted, least)
        columns = np.where(better, column, columns)
        rows = np.where(better, row, rows)
    return columns, rows


def _nearest_grid(rules: NearestGrid, images: _Images) -> _Cut:
    columns, rows = np.ones((2, len(images.widths)), np.int64)
    limits = np.maximum(1, rules.max_tiles // images.many) if rules.divided else np.full(len(columns), rules.max_tiles)
    for most in np.unique(limits).tolist():
        own = limits == most
        columns[own], rows[own] = closest_grids(images.widths[own], images.heights[own], rules.pixels, most)
    # A grid of one tile is its own overview.
    tiles = columns * rows + (columns * rows > 1)
    return tiles, rules.encoder_tokens, tiles * rules.llm_tokens + rules.markers


def closest_grids(widths: IntArray, heights: IntArray, pixels: int, most: int) -> tuple[IntArray, IntArray]:
    """Columns and rows of the grid of at most ``most`` tiles whose aspect ratio is nearest ``[images]`` each.

    Grids are tried from the smallest, with fewer columns first if the number of tiles is equal. Of equally near grids a
    later one is taken if the image has more than half its pixels (InternVL, arXiv:2404.16821, section 3.2). Sides are
    in whole pixels ``[images]``, ``pixels`` is the side of a tile.
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
    return np.where(cut, rows * columns + 1, 1), rules.encoder_tokens, llm


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
    return 1, rows * columns * rules.merge**2, rows * (columns + 1)


def _padded_size(rules: PaddedSize, images: _Images) -> _Cut:
    sides = np.stack((images.heights, images.widths))
    patches = np.maximum(1, sides // rules.pixels).prod(axis=0)
    longest = rules.max_side * rules.pixels
    scale = np.minimum(np.sqrt(rules.max_patches / patches), (longest / sides).min(axis=0))
    resized = np.clip(np.floor(sides * np.minimum(1.0, scale)), 1, longest).astype(np.int64)
    rows, columns = -(-resized // (rules.pixels * rules.merge))
    return 1, rows * columns * rules.merge**2, rows * columns


def _resampled(rules: Resampled, images: _Images) -> _Cut:
    whole = _patches_between(rules, images.widths, images.heights)
    if not rules.quarters:
        # A marker on each side.
        return 1, whole, rules.llm_tokens + 2
    quarter = _patches_between(rules, np.maximum(1, images.widths // 2), np.maximum(1, images.heights // 2))
    # Quarters and the whole image as tiles of equal length, with a marker between any two and at both ends.
    return 5, -(-(4 * quarter + whole) // 5), 5 * rules.llm_tokens + 6


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
    columns, rows = (np.where(too_many, *pair) for pair in zip(closest, (columns, rows), strict=True))
    width = columns * pixels
    height = rows * pixels
    by_width = width / images.widths
    by_height = height / images.heights
    narrow = by_width < by_height
    free_below = np.where(narrow, height - np.floor(images.heights * by_width).astype(np.int64), 0)
    free_right = np.where(narrow, 0, width - np.floor(images.widths * by_height).astype(np.int64))
    side = pixels // patch
    # Every second patch of every tile's lines and columns becomes an LLM token.
    down = _every_second(rows * side - free_below // patch, side)
    across = _every_second(columns * side - free_right // patch, side)
    return columns * rows + 1, side**2, down * across + down + OVERVIEW_TOKENS


def _every_second(kept: IntArray, side: int) -> IntArray:
    """Return the number of first patches at even places of their tile, for tiles of ``side`` patches ``[images]``."""
    whole, rest = np.divmod(kept, side)
    return np.asarray(whole * (-(-side // 2)) + (rest + 1) // 2)


# Function of each kind of rule, which takes rules of its kind.
_METHODS: Mapping[type, Callable[[Any, _Images], _Cut]] = {
    FixedSize: lambda rules, _: (1, rules.encoder_tokens, rules.llm_tokens),
    AnyResolution: _any_resolution,
    NearestGrid: _nearest_grid,
    LongestEdge: _longest_edge,
    NativeSize: _native_size,
    PaddedSize: _padded_size,
    Resampled: _resampled,
    PaddedGrid: _padded_grid,
}


def best_grids(widths: IntArray, heights: IntArray, rules: TileRules) -> tuple[IntArray, IntArray]:
    """Columns and rows of the grid that keeps most pixels of each image, then wastes fewest ``[images]`` each.

    Of equal grids the one with fewer columns, then fewer rows, is taken. Sides are in pixels ``[images]``. The rules
    are those of LLaVA-OneVision (arXiv:2408.03326, section 3) as DFLOP's public code runs it (BDAI-Research/DFLOP,
    60e86d8): the thumbnail is encoded, but its features do not reach the LLM.
    """

    def fitted(width: int, height: int) -> IntArray:
        by_width = width * heights <= height * widths
        return np.where(by_width, width * (heights * width // widths), height * (widths * height // heights))

    sides = range(1, rules.max_grid + 1)
    return _most_kept(widths, heights, product(sides, sides), rules.pixels, fitted)


def grid_tokens(widths: IntArray, heights: IntArray, columns: IntArray, rows: IntArray, rules: TileRules) -> IntArray:
    """LLM tokens of images on their grids: padding cut off, scaled down to the limit, a newline after each line."""
    down, across = _unpadded(widths, heights, columns, rows, rules.llm_side, rules.max_llm_tiles)
    return np.asarray(np.maximum(1, down) * (np.maximum(1, across) + 1))


def tiled_images(counts: IntArray, widths: FloatArray, heights: FloatArray, rules: TileRules) -> Items:
    """Images as tiles: the only image of a sample on its grid and as a thumbnail, one of several padded to one tile.

    An image's LLM tokens are spread evenly over its tiles. ``counts`` are images by sample; sides are in pixels.
    """
    encoder_tokens = rules.encoder_side**2
    llm_tokens = rules.llm_side**2
    if rules.dynamic_tiles:
        nearest = NearestGrid(rules.pixels, rules.dynamic_tiles, encoder_tokens, llm_tokens, markers=0)
        return processed_images(counts, widths, heights, nearest)
    wide, high = _whole_pixels(widths, heights)
    alone = np.repeat(counts == 1, counts)
    tiles = np.ones(len(wide), np.int64)
    tokens = np.full(len(wide), llm_tokens + 1)
    columns, rows = best_grids(wide[alone], high[alone], rules)
    tiles[alone] = columns * rows + 1
    tokens[alone] = grid_tokens(wide[alone], high[alone], columns, rows, rules)
    return tiled_items(counts, tiles, np.full(len(wide), encoder_tokens), tokens)


def frame_rules(rules: TileRules) -> FrameRules:
    """Return the rules of a video whose frames are one tile, pooled by 2 x 2 for the LLM, with a newline per line.

    With dynamic tiling nothing is pooled and there is no newline.
    """
    side = -(-rules.llm_side // 2)
    tokens = rules.llm_side**2 if rules.dynamic_tiles else side * (side + 1)
    return FrameRules(rules.encoder_side**2, tokens, rules.max_frames)
