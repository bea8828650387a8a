"""Images cut into tiles, whose counts are those of ``tiles``."""

from __future__ import annotations

from math import ceil

import numpy as np
from PIL import Image

from entrain_bench.base.arrays import IntArray
from entrain_bench.specs.contents import Pixels
from entrain_bench.specs.tokens import TileRules

from ..tiles import best_grids, nearest_grids
from .decode import resized

# SigLIP's mean colour, beside images that are no squares.
_GREY = (127, 127, 127)


def tile_of(number: int, widths: IntArray, heights: IntArray, rules: TileRules) -> tuple[int, int]:
    """The image that a tile of a sample's images (sides in pixels) is of, and the tile's number within the image."""
    if rules.dynamic_tiles is None:
        return (0, number) if len(widths) == 1 else (number, 0)
    columns, rows = nearest_grids(widths, heights, rules)
    tiles = columns * rows
    ends = np.cumsum(tiles + (tiles > 1))
    image = int(np.searchsorted(ends, number, side="right"))
    return image, number - (int(ends[image - 1]) if image else 0)


def image_tiles(image: Image.Image, alone: bool, rules: TileRules) -> list[Pixels]:
    """The tiles of an RGB image ``[pixels, pixels, 3]``, in the order of the published processors.

    LLaVA-OneVision's (arXiv:2408.03326, section 3): a thumbnail, then, of a sample's only image (``alone``), the tiles
    of its grid, on which it is fitted and padded with black; of one among several the whole, padded to a square.
    InternVL's (arXiv:2404.16821, section 3.2): the image stretched to its grid, then, with several tiles, a thumbnail.
    """
    side = rules.pixels
    sizes = np.array([image.width]), np.array([image.height])
    thumbnail = resized(image, side, side)
    if rules.dynamic_tiles is not None:
        columns, rows = (int(each[0]) for each in nearest_grids(*sizes, rules))
        tiles = _cut(resized(image, rows * side, columns * side), side)
        return tiles if len(tiles) == 1 else [*tiles, thumbnail]
    if not alone:
        return [resized(_squared(image), side, side)]
    columns, rows = (int(each[0]) for each in best_grids(*sizes, rules))
    return [thumbnail, *_cut(_fitted(image, rows * side, columns * side), side)]


def _cut(pixels: Pixels, side: int) -> list[Pixels]:
    height, width, _ = pixels.shape
    return [
        pixels[row : row + side, column : column + side]
        for row in range(0, height, side)
        for column in range(0, width, side)
    ]


def _fitted(image: Image.Image, height: int, width: int) -> Pixels:
    """An image as large as fits with its proportions, in the middle of black."""
    if width * image.height < height * image.width:
        high = min(height, ceil(image.height * (width / image.width)))
        wide = width
    else:
        high = height
        wide = min(width, ceil(image.width * (height / image.height)))
    canvas = np.zeros((height, width, 3), np.uint8)
    top = (height - high) // 2
    left = (width - wide) // 2
    canvas[top : top + high, left : left + wide] = resized(image, high, wide)
    return canvas


def _squared(image: Image.Image) -> Image.Image:
    side = max(image.size)
    canvas = Image.new("RGB", (side, side), _GREY)
    canvas.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return canvas
