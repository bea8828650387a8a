"""Tiles are those of the published models' processors, and each item of a sample is its own tile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from entrain_bench.specs.contents import Moved, Pixels
from entrain_bench.specs.tokens import TileRules, TokenRules
from entrain_bench_workloads.dataset.cutting import image_tiles
from entrain_bench_workloads.dataset.parquet import ParquetSource
from entrain_bench_workloads.dataset.records import RecordSource
from entrain_bench_workloads.trace import TraceWorkload
from support.datasets import picture_bytes, scan_here, video_bytes, write_finevision, write_jsonl
from support.specs import rules_of

RULES = {"llavaov": rules_of("llavaov"), "internvl": rules_of("internvl_dynamic")}
SIZES = [(500, 333), (120, 900), (384, 384), (1300, 1250)]


def tiles_of(name: str) -> TileRules:
    found = RULES[name].tiles
    assert found is not None
    return found


def photograph(width: int, height: int) -> Image.Image:
    coarse = np.random.default_rng(width * height).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def pixels(values: Any) -> list[Pixels]:
    """A processor's output, whose colours are left as they are."""
    return list(np.rint(values).astype(np.uint8).transpose(0, 2, 3, 1))


PLAIN = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_llava_onevision(width: int, height: int) -> None:
    transformers = pytest.importorskip("transformers")
    processor = transformers.LlavaOnevisionImageProcessorPil(
        size={"height": 384, "width": 384}, image_mean=[0.5] * 3, **PLAIN
    )
    image = photograph(width, height)
    theirs = pixels(processor([image])["pixel_values"][0])
    ours = image_tiles(image, True, tiles_of("llavaov"))
    assert len(ours) == len(theirs) > 1
    np.testing.assert_array_equal(ours, theirs)
    together = pixels(processor([[image, image]])["pixel_values"][1])
    np.testing.assert_array_equal(image_tiles(image, False, tiles_of("llavaov")), together)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_internvl(width: int, height: int) -> None:
    transformers = pytest.importorskip("transformers")
    processor = transformers.GotOcr2ImageProcessorPil(
        size={"height": 448, "width": 448}, min_patches=1, max_patches=12, crop_to_patches=True, **PLAIN
    )
    image = photograph(width, height)
    theirs = pixels(processor([image])["pixel_values"])
    np.testing.assert_array_equal(image_tiles(image, True, tiles_of("internvl")), theirs)


@pytest.mark.parametrize("name", RULES)
def test_items_are_the_tiles_of_their_images(name: str, tmp_path: Path) -> None:
    sizes = [[(500, 333)], [(500, 333), (90, 700)], []]
    images = [[picture_bytes(*size) for size in row] for row in sizes]
    write_finevision(tmp_path / "d.parquet", [(row, ["text"]) for row in images])
    source = ParquetSource(path=str(tmp_path / "d.parquet"), text=["texts"], images="images")
    rules = RULES[name]
    side = rules.patch_pixels * tiles_of(name).encoder_side
    samples, shapes = opened(scan_here(source, tmp_path / "t.parquet"), rules)
    for sample, row in enumerate(sizes):
        wanted = []
        for size in row:
            coarse = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8))
            image = coarse.resize(size, Image.Resampling.BICUBIC)
            wanted += image_tiles(image, len(row) == 1, tiles_of(name))
        items = range(*shapes.item_offsets[sample : sample + 2].tolist())
        found = [samples.picture(shapes, item) for item in items]
        assert len(found) == len(wanted)
        for one, tile in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one, tile[None, :side, :side])


def test_frames_of_a_video_are_tiles(tmp_path: Path) -> None:
    (tmp_path / "v.mp4").write_bytes(video_bytes(64, 48, 40, shades=True))
    write_jsonl(tmp_path / "d.jsonl", [{"text": "a", "video": "v.mp4"}])
    source = RecordSource(path=str(tmp_path / "d.jsonl"), text=["text"], video="video")
    samples, shapes = opened(scan_here(source, tmp_path / "t.parquet"), RULES["llavaov"])
    found = [samples.picture(shapes, item) for item in range(shapes.num_items)]
    assert {frames.shape for frames in found} == {(1, 378, 378, 3)}
    np.testing.assert_allclose([frames.mean() for frames in found], [30, 90, 150, 210], atol=4)


def opened(trace: Path, rules: TokenRules) -> Any:
    workload = TraceWorkload(path=str(trace))
    return workload.samples(rules, 1024, Moved()), workload.source(rules).shapes
