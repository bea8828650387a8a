"""Pictures made on the spot, means over repetitions, and a figure that shows every one of them."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from PIL import Image

from entrain_bench.figures._runner import render
from entrain_bench.lab.preprocessing import CAPTION_CHARS, PANELS, SIZES, draw, write_pictures
from entrain_bench.train.settings import PREPROCESSING

NAMES = [f"{width}x{height}" for width, height in SIZES]
QUANTITIES = ("input_stall_s", "iteration_time_s", "cpu_s")


def runs() -> pd.DataFrame:
    """Two repetitions, whose values are 1 apart."""
    rows = [
        {"repetition": repetition, "size": name, "preprocessing": mode, "load": 1.0 + repetition}
        | dict.fromkeys(QUANTITIES, 10.0 * place + step + repetition + 1)
        for repetition in range(2)
        for place, name in enumerate(NAMES)
        for step, mode in enumerate(PREPROCESSING)
    ]
    return pd.DataFrame(rows)


@pytest.mark.wide
def test_the_figure_shows_means_and_ratios_within_a_repetition() -> None:
    figure, table, message = draw(runs(), 2)
    heights = [sorted(bar.get_height() for bar in panel.patches if bar.get_height()) for panel in figure.axes]
    # Of 12 and 13, the second repetition: 12.5. Of 12 / 11 and 13 / 12 the geometric mean.
    assert min(abs(np.array(heights[0]) - 12.5)) == pytest.approx(0)
    assert min(abs(np.array(heights[1]) - np.sqrt(12 / 11 * 13 / 12))) == pytest.approx(0, abs=1e-9)
    assert (table.loc[table["preprocessing"] == "inline", "cpu_s_ratio"] == 1).all()
    assert len(heights) == len(PANELS)
    assert "DataLoader workers on 2 cores" in message
    assert {"pdf", "png", "csv"} == set(render(lambda: draw(runs(), 2)))


def test_pictures_follow_from_the_seed_and_have_something_to_decode(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one", "again", "other")]
    for file, seed in zip(files, (3, 3, 4), strict=True):
        write_pictures(file, 40, 96, 64, seed)
    one, again, other = (file.read_bytes() for file in files)
    assert one == again != other
    rows = pq.read_table(files[0]).to_pylist()
    assert len({row["images"][0]["bytes"] for row in rows}) == len(rows) == 40
    assert {len(row["texts"][0]["assistant"]) for row in rows} == {CAPTION_CHARS}
    for row in rows[:4]:
        pixels = np.asarray(Image.open(io.BytesIO(row["images"][0]["bytes"])))
        assert pixels.shape == (64, 96, 3)
        # Neither one colour nor noise alone: neighbours are alike, places far from each other are not.
        grey = pixels.mean(axis=2)
        near, whole = np.abs(np.diff(grey, axis=1)).mean(), grey.std()
        assert 2.0 < near < whole
