"""Tiles: grids by brute force in exact fractions, tokens by hand, and workloads of pixels."""

from dataclasses import replace
from fractions import Fraction
from math import floor
from typing import Any

import numpy as np
import pytest

from entrain_bench.specs.tokens import TileRules, TokenRules
from entrain_bench_workloads.processors import best_grids, frame_rules, grid_tokens, tiled_images
from entrain_bench_workloads.synthetic import PixelWorkload
from entrain_bench_workloads.tokens import video_items

SIGLIP = TileRules(pixels=384, encoder_side=27, llm_side=27, max_grid=6, max_llm_tiles=9, max_frames=32)
INTERNVL = TileRules(pixels=448, encoder_side=32, llm_side=16, max_grid=6, max_llm_tiles=9, max_frames=32)
RULES = TokenRules(14, 1, 16, 1, 1.0, 50.0, 2, 30.0, 4.0, tiles=SIGLIP)


def grid_by_brute_force(width: int, height: int, rules: TileRules) -> tuple[int, int]:
    """The grid that keeps most pixels of an image scaled to fit into it, never enlarged; then the smallest area."""
    side = rules.pixels
    scored = []
    for columns in range(1, rules.max_grid + 1):
        for rows in range(1, rules.max_grid + 1):
            scale = min(Fraction(columns * side, width), Fraction(rows * side, height))
            kept = min(floor(width * scale) * floor(height * scale), width * height)
            scored.append((-kept, columns * rows, columns, rows))
    return min(scored)[2:]


@pytest.mark.parametrize("rules", [SIGLIP, INTERNVL, replace(SIGLIP, max_grid=2)])
def test_grids_by_brute_force(rules: TileRules) -> None:
    rng = np.random.default_rng(0)
    widths, heights = rng.integers(1, 4000, 300), rng.integers(1, 4000, 300)
    widths[:3], heights[:3] = (384, 768, 2304), (384, 768, 2304)
    columns, rows = best_grids(widths, heights, rules)
    for width, height, column, row in zip(widths, heights, columns, rows, strict=True):
        assert (column, row) == grid_by_brute_force(int(width), int(height), rules)


@pytest.mark.parametrize(
    ("width", "height", "grid", "tokens"),
    [
        (384, 384, (1, 1), 27 * 28),
        # 640 x 480 in 2 x 2: of 54 lines 54 x 480 / 640 = 40.5, so 40 are the image and 14 padding.
        (640, 480, (2, 2), 40 * 55),
        # 480 x 640: of 54 columns 40, so lines of 40 and a newline.
        (480, 640, (2, 2), 54 * 41),
        (1152, 1152, (3, 3), 81 * 82),
        # 36 tiles are 162 x 162: scaled down by 2 to 81 x 81.
        (2304, 2304, (6, 6), 81 * 82),
        # 10 tiles, 54 x 135, are 1.05 of the side of 9: kept.
        (768, 1920, (2, 5), 135 * 55),
    ],
)
def test_an_image_on_its_grid_by_hand(width: int, height: int, grid: tuple[int, int], tokens: int) -> None:
    columns, rows = best_grids(np.array([width]), np.array([height]), SIGLIP)
    assert (columns[0], rows[0]) == grid
    assert grid_tokens(np.array([width]), np.array([height]), columns, rows, SIGLIP)[0] == tokens


def test_one_image_is_cut_and_several_are_not() -> None:
    items = tiled_images(np.array([1, 0, 2]), np.array([2304.0, 9, 3000]), np.array([2304.0, 9, 3000]), SIGLIP)
    assert items.counts.tolist() == [37, 0, 2]
    assert np.all(items.encoder_tokens == 729)
    assert items.llm_tokens[:37].sum() == 81 * 82
    assert set(items.llm_tokens[:37].tolist()) == {179, 180}
    assert items.llm_tokens[37:].tolist() == [730, 730]


def test_frames_are_pooled_and_limited() -> None:
    seconds = np.array([3.0, np.nan, 2.2, 100.0, 0.1])
    items = video_items(seconds, np.ones(4), np.ones(4), replace(RULES, video_frames_per_s=1.0), 1, 2)
    assert items.counts.tolist() == [3, 0, 3, 32, 1]
    assert set(items.llm_tokens.tolist()) == {14 * 15}
    assert set(items.encoder_tokens.tolist()) == {729}
    assert frame_rules(INTERNVL).llm_tokens == 8 * 9


def pixels(**changed: Any) -> PixelWorkload:
    images = {"side": {"kind": "lognormal", "median": 500, "sigma": 0.5, "max": 2000}, "aspect": 2.0}
    return PixelWorkload(**{"name": "mine", "text": 50, "images": images, **changed})


def test_pixels_become_tokens_by_the_models_rules() -> None:
    shapes = pixels().source(RULES).batch(0, 500, 0)
    counts = np.diff(shapes.item_offsets)
    assert counts.min() >= 2
    assert len({*counts.tolist()}) > 3
    assert np.all(shapes.item_encoder_tokens == 729)
    whole = pixels().source(replace(RULES, tiles=None)).batch(0, 500, 0)
    assert np.all(np.diff(whole.item_offsets) == 1)


def test_text_gives_way_to_the_context() -> None:
    whole = pixels(text=5000).source(RULES).batch(0, 200, 0)
    cut = pixels(text=5000).source(replace(RULES, context_tokens=6000)).batch(0, 200, 0)
    items = whole.llm_tokens - whole.text_tokens
    assert cut.text_tokens.tolist() == np.clip(6000 - items, 1, 5000).tolist()
