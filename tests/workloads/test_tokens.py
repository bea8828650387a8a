"""Token rules against numbers worked out by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrain_bench.specs.tokens import TokenRules
from entrain_bench_workloads.tokens import audio_items, image_grids, image_items, text_tokens, video_items

RULES = TokenRules(
    patch_pixels=14,
    merge_patches=2,
    min_image_tokens=4,
    temporal_patch_frames=2,
    video_frames_per_s=2.0,
    audio_frames_per_s=50.0,
    audio_merge_frames=2,
    audio_segment_s=30.0,
    text_chars_per_token=4.0,
)


def tokens(width: float, height: float, min_tokens: int = 4, max_tokens: int = 16384) -> int:
    return int(image_grids(np.array([width]), np.array([height]), RULES, min_tokens, max_tokens).prod())


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [
        (56, 56, 4),
        (640, 480, 23 * 17),  # 22.86 and 17.14 cells
        (800, 557, 29 * 20),  # 28.57 and 19.89 cells
        (42, 98, 2 * 4),  # 1.5 and 3.5 cells: halves go to even
        (70, 70, 4),  # 2.5 cells go to 2
        (1, 1, 4),  # enlarged 56 times: 2 x 2 cells
        (10, 30, 2 * 4),  # nearest 1 x 1 < 4: enlarged by 3.233 to 1.15 x 3.46 cells, rounded up
        (28, 5600, 200),
    ],
)
def test_image_resize_by_hand(width: int, height: int, expected: int) -> None:
    assert tokens(width, height) == expected


def test_image_above_the_cap_by_hand() -> None:
    # 100 cells allowed; 560 x 280 is 20 x 10 cells, scaled by 1 / sqrt(2): 14.14 x 7.07.
    assert tokens(560, 280, max_tokens=100) == 14 * 7
    # 1 x 200 cells, scaled by 1 / sqrt(2): 0.7 rounds up to one cell and 141 exceed the cap, so the long side is cut.
    assert tokens(28, 5600, max_tokens=100) == 100


def test_image_items_encode_every_patch() -> None:
    items = image_items(np.array([0, 2]), np.array([56.0, 84.0]), np.array([56.0, 56.0]), RULES, 16384)
    assert items.counts.tolist() == [0, 2]
    assert items.llm_tokens.tolist() == [4, 6]
    assert items.encoder_tokens.tolist() == [16, 24]


def test_video_groups_by_hand() -> None:
    # 7.4 s at 2 fps: 14 whole frames, 7 groups; 0.2 s: still one group; 5.99 s: 11 frames, 5 groups.
    seconds = np.array([7.4, np.nan, 0.2, 5.99])
    items = video_items(seconds, np.array([640.0, 1960, 56]), np.array([360.0, 1120, 56]), RULES, 128, 768)
    # 640 x 360 is 23 x 13 cells; 1960 x 1120 is 70 x 40 = 2800, scaled by sqrt(768 / 2800): 36.66 x 20.95;
    # 56 x 56 is 4, enlarged to 11.31 x 11.31, rounded up.
    assert items.counts.tolist() == [7, 0, 1, 5]
    assert items.llm_tokens.tolist() == [299] * 7 + [36 * 20] + [144] * 5
    assert np.array_equal(items.encoder_tokens, 4 * items.llm_tokens)


def test_video_seconds_rounded_by_float32_keep_their_frames() -> None:
    seconds = np.array([np.float32(8.7)], np.float64) * 10  # 86.99999
    items = video_items(seconds, np.array([56.0]), np.array([56.0]), RULES, 4, 768)
    assert items.counts.tolist() == [87]


def test_audio_segments_by_hand() -> None:
    items = audio_items(np.array([np.nan, 0.001, 1.01, 30.0, 30.02, 75.5]), RULES)
    assert items.counts.tolist() == [0, 1, 1, 1, 2, 3]
    assert items.encoder_tokens.tolist() == [1, 51, 1500, 1500, 1, 1500, 1500, 775]
    assert items.llm_tokens.tolist() == [1, 26, 750, 750, 1, 750, 750, 388]


@given(st.lists(st.floats(0.0078125, 500, width=32), min_size=1, max_size=20))
def test_audio_items_partition_the_audio(seconds: list[float]) -> None:
    items = audio_items(np.array(seconds), RULES)
    assert items.encoder_tokens.sum() == sum(max(1, math.ceil(round(s * 50, 3))) for s in seconds)
    assert items.encoder_tokens.max() <= 1500
    assert items.encoder_tokens.min() >= 1


def test_text_tokens_round_up() -> None:
    assert text_tokens(np.array([0.0, 1, 4, 5]), RULES).tolist() == [0, 1, 1, 2]
