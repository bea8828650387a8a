"""Frames whose size a trace does not have: one flag gives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.specs.tokens import TokenRules
from entrain_bench_workloads.columns import read_columns
from entrain_bench_workloads.trace import TraceWorkload

RULES = TokenRules(14, 2, 4, 2, 2.0, 50.0, 2, 30.0, 4.0)
FRAME = (640.0, 360.0)


def trace(folder: Path, **columns: Any) -> Path:
    path = folder / "t.parquet"
    pd.DataFrame({"text_tokens": [5] * len(columns["video_seconds"]), **columns}).to_parquet(path)
    return path


def test_zeros_and_missing_entries_are_filled_and_others_stay(tmp_path: Path) -> None:
    path = trace(
        tmp_path,
        video_seconds=[4.0, 4.0, 4.0, None, 4.0],
        image_widths=[[100, 0], [100, 320], [], [50], [30]],
        image_heights=[[90, 0], [90, 240], [], [60], [40]],
        n_images=[1, 1, 0, 1, 1],
    )
    found = read_columns(path, frame_size=FRAME)
    assert found.num_images.tolist() == [1, 1, 0, 1, 1]
    assert found.image_widths.tolist() == [100, 100, 50, 30]
    assert found.frame_widths.tolist() == [640, 320, 640, 640]
    assert found.frame_heights.tolist() == [360, 240, 360, 360]


def test_without_any_sizes_all_frames_have_it(tmp_path: Path) -> None:
    path = trace(tmp_path, video_seconds=[4.0, None, 2.0])
    found = read_columns(path, frame_size=FRAME)
    assert found.frame_widths.tolist() == [640, 640]
    shapes = TraceWorkload(path=str(path), frame_size=[640, 360]).source(RULES).shapes
    # 640 x 360 is 23 x 13 cells of 28 pixels; 2 frames a second, 2 a group.
    assert shapes.item_llm_tokens.tolist() == [23 * 13] * 6
    np.testing.assert_array_equal(np.diff(shapes.item_offsets), [4, 0, 2])


def test_without_the_flag_the_row_is_named_and_the_flag(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"row 1, .*workload.frame_size=\[640,360\]"):
        read_columns(trace(tmp_path, video_seconds=[4.0]))
    zero = trace(tmp_path, video_seconds=[4.0], image_widths=[[0]], image_heights=[[0]])
    with pytest.raises(UserError, match=r"row 1, column image_widths: 0.0; .*workload.frame_size"):
        read_columns(zero)


def test_an_image_of_no_size_stays_an_error(tmp_path: Path) -> None:
    path = trace(tmp_path, video_seconds=[4.0], image_widths=[[0, 9]], image_heights=[[9, 9]])
    with pytest.raises(UserError, match=r"row 1, column image_widths: 0.0"):
        read_columns(path, frame_size=FRAME)


@pytest.mark.parametrize("size", [[640], [640, 0], [640, 360, 3], [640.5, 360], [1, 500], [True, 1]])
def test_bad_sizes_are_one_line(size: list[Any]) -> None:
    with pytest.raises(UserError, match=r"workload.frame_size=.*must be \[width, height\]"):
        TraceWorkload(path="x.parquet", frame_size=size)
