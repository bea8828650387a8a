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
from entrain_bench.lab.preprocessing import (
    CAPTION_CHARS,
    KEPT,
    PANELS,
    QUANTITIES,
    SIZES,
    Prepared,
    draw,
    summary,
    write_pictures,
)
from entrain_bench.train.settings import PREPROCESSING

NAMES = [f"{width}x{height}" for width, height in SIZES]
PICTURES = [Prepared(name, Path("trace"), 1000.0 * (i + 1), 0.002 * (i + 1)) for i, name in enumerate(NAMES)]


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


def test_rows_are_means_with_their_intervals() -> None:
    table = summary(runs(), PICTURES)
    assert len(table) == len(SIZES) * len(PREPROCESSING)
    row = table.iloc[4]
    assert (row["size"], row["preprocessing"], row["repetitions"]) == (NAMES[1], PREPROCESSING[1], 2)
    assert (row["picture_kb"], row["decode_ms"], row["load_average"]) == (2.0, 4.0, 1.5)
    # Of 12 and 13: the mean 12.5; Student's t at one degree of freedom 12.706 times the standard error 0.5.
    assert row["input_stall_s"] == 12.5
    assert row["input_stall_s_high"] - 12.5 == pytest.approx(12.706 * 0.5, rel=1e-4)


def test_times_are_compared_within_a_repetition() -> None:
    table = summary(runs().sample(frac=1, random_state=0), PICTURES).set_index(["size", "preprocessing"])
    size = NAMES[1]
    assert (table.loc[(size, "inline"), ["cpu_s_ratio", "cpu_s_ratio_low", "cpu_s_ratio_high"]] == 1).all()
    # 12 / 11 and 13 / 12: the second repetition is slower, and that is no noise of the ratio.
    row = table.loc[(size, "thread")]
    assert row["iteration_time_s_ratio"] == pytest.approx(np.sqrt(12 / 11 * 13 / 12))
    assert row["iteration_time_s_ratio_high"] / row["iteration_time_s_ratio"] == pytest.approx(
        np.exp(12.706 * abs(np.log(12 / 11) - np.log(13 / 12)) / 2), rel=1e-4
    )


@pytest.mark.wide
def test_the_figure_shows_every_mean() -> None:
    table = summary(runs(), PICTURES)
    figure, shown, message = draw(table, 2)
    assert shown.equals(table)
    for panel, name in zip(figure.axes, PANELS, strict=True):
        heights = sorted(bar.get_height() for bar in panel.patches)
        np.testing.assert_allclose(heights, sorted(table[name]))
    assert "DataLoader workers on 2 cores" in message
    assert {"pdf", "png", "csv"} == set(render(lambda: draw(table, 2)))


def test_pictures_follow_from_the_seed(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one", "again", "other")]
    made = [write_pictures(file, 40, 96, 64, seed) for file, seed in zip(files, (3, 3, 4), strict=True)]
    one, again, other = (file.read_bytes() for file in files)
    assert one == again != other
    rows = pq.read_table(files[0]).to_pylist()
    contents = [row["images"][0]["bytes"] for row in rows]
    assert len(set(contents)) == len(rows) == 40
    assert made[0][0] == sum(map(len, contents))
    assert made[0][1] == contents[:KEPT]
    assert {len(row["texts"][0]["assistant"]) for row in rows} == {CAPTION_CHARS}


def test_pictures_have_their_size_and_something_to_decode(tmp_path: Path) -> None:
    _, first = write_pictures(tmp_path / "file", 4, 320, 200, 0)
    for content in first:
        pixels = np.asarray(Image.open(io.BytesIO(content)))
        assert pixels.shape == (200, 320, 3)
        # Neither one colour nor noise alone: neighbours are alike, places far from each other are not.
        grey = pixels.mean(axis=2)
        near, whole = np.abs(np.diff(grey, axis=1)).mean(), grey.std()
        assert 2.0 < near < whole
