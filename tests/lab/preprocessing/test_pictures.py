"""Pictures made on the spot: the same for a seed, all different, as large as asked for, in FineVision's columns."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from PIL import Image

from entrain_bench.lab.preprocessing import CAPTION_CHARS, KEPT, write_pictures


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
