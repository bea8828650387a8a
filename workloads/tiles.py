"""Images and frames cut into tiles of one size ("anyres"): pure functions of a model's ``TileRules``.

The rules are those of LLaVA-OneVision's preprocessing (arXiv:2408.03326, section 3) as DFLOP's public code runs it
(BDAI-Research/DFLOP, 60e86d8): the thumbnail is encoded, but its features do not reach the LLM.
"""

from __future__ import annotations

import numpy as np

from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.specs.shapes import Items
from entrain_bench.specs.tokens import FrameRules, TileRules

from .processors import SLACK, closest_grids, tiled_items


def best_grids(widths: IntArray, heights: IntArray, rules: TileRules) -> tuple[IntArray, IntArray]:
    """Columns and rows of the grid that keeps most pixels of each image, then wastes fewest ``[images]`` each.

    Of equal grids the one with fewer columns, then fewer rows, is taken. Sides are in pixels ``[images]``.
    """
    most = np.full(len(widths), -1)
    least = np.zeros(len(widths), np.int64)
    columns = np.ones(len(widths), np.int64)
    rows = np.ones(len(widths), np.int64)
    for column in range(1, rules.max_grid + 1):
        for row in range(1, rules.max_grid + 1):
            width = column * rules.pixels
            height = row * rules.pixels
            by_width = width * heights <= height * widths
            fitted = np.where(by_width, width * (heights * width // widths), height * (widths * height // heights))
            kept = np.minimum(fitted, widths * heights)
            wasted = width * height - kept
            better = (kept > most) | ((kept == most) & (wasted < least))
            most = np.where(better, kept, most)
            least = np.where(better, wasted, least)
            columns = np.where(better, column, columns)
            rows = np.where(better, row, rows)
    return columns, rows


def grid_tokens(widths: IntArray, heights: IntArray, columns: IntArray, rows: IntArray, rules: TileRules) -> IntArray:
    """LLM tokens of images on their grids: padding cut off, scaled down to the limit, a newline after each line."""
    side = rules.llm_side
    across = columns * side
    down = rows * side
    wide = widths * down > heights * across
    down = down - np.where(wide, 2 * ((down - heights * across // widths) // 2), 0)
    across = across - np.where(wide, 0, 2 * ((across - widths * down // heights) // 2))
    times = np.sqrt(across * down / (rules.max_llm_tiles * side**2))
    shrunk = times > SLACK
    # As theirs: a quotient that is whole but for its last digit goes down.
    down = np.where(shrunk, down // times, down).astype(np.int64)
    across = np.where(shrunk, across // times, across).astype(np.int64)
    return np.asarray(np.maximum(1, down) * (np.maximum(1, across) + 1))


def tiled_images(counts: IntArray, widths: FloatArray, heights: FloatArray, rules: TileRules) -> Items:
    """Images as tiles: the only image of a sample on its grid and as a thumbnail, one of several padded to one tile.

    An image's LLM tokens are spread evenly over its tiles. ``counts`` are images of each sample ``[samples]``, sides in
    pixels ``[images]``.
    """
    wide, high = (np.maximum(1, np.rint(sides)).astype(np.int64) for sides in (widths, heights))
    encoder = np.full(len(wide), rules.encoder_side**2)
    if rules.dynamic_tiles:
        columns, rows = nearest_grids(wide, high, rules)
        # A grid of one tile is its own thumbnail.
        tiles = columns * rows + (columns * rows > 1)
        return tiled_items(counts, tiles, encoder, tiles * rules.llm_side**2)
    alone = np.repeat(counts == 1, counts)
    tiles = np.ones(len(wide), np.int64)
    tokens = np.full(len(wide), rules.llm_side**2 + 1)
    columns, rows = best_grids(wide[alone], high[alone], rules)
    tiles[alone] = columns * rows + 1
    tokens[alone] = grid_tokens(wide[alone], high[alone], columns, rows, rules)
    return tiled_items(counts, tiles, encoder, tokens)


def nearest_grids(widths: IntArray, heights: IntArray, rules: TileRules) -> tuple[IntArray, IntArray]:
    """Columns and rows of the grid of at most ``dynamic_tiles`` whose proportions are nearest ``[images]`` each.

    InternVL's dynamic tiling (arXiv:2404.16821, section 3.2).
    """
    return closest_grids(widths, heights, rules.pixels, rules.dynamic_tiles or 1)


def frame_rules(rules: TileRules) -> FrameRules:
    """Return the rules of a video whose frames are one tile, pooled by 2 x 2 for the LLM, with a newline per line.

    With dynamic tiling nothing is pooled and there is no newline.
    """
    side = -(-rules.llm_side // 2)
    tokens = rules.llm_side**2 if rules.dynamic_tiles else side * (side + 1)
    return FrameRules(rules.encoder_side**2, tokens, rules.max_frames)
