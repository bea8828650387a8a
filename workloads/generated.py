"""Generated traces of data that the packaged ones lack: sizes drawn so that published statistics hold.

``python -m entrain_bench_workloads.generated FOLDER`` writes them; workloads/traces/PROVENANCE.md has the sources. All
other parameters are assumed, and marked so.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from entrain_bench.base.arithmetic import exp
from entrain_bench.base.arrays import FloatArray, IntArray, offsets_from_counts

from .marginals import parse_marginal

ROWS = 2000
CHARS_PER_TOKEN = 4.0
# Means of MMC4 (arXiv:2304.06939, abstract): 571M images and 43B tokens in 101.2M documents.
MMC4_IMAGES = 571 / 101.2
MMC4_TOKENS = 43_000 / 101.2
# InfographicVQA (arXiv:2104.12756, abstract): 30,035 questions on 5,485 images. Of its 2,801 validation samples the
# smallest image has 600 x 340 pixels, the largest 6,250 x 9,375 (EvalScope 1.6, InfoVQA).
QUESTIONS_PER_IMAGE = 30_035 / 5_485
LEAST_PIXELS = 600 * 340
MOST_PIXELS = 6_250 * 9_375
# Rows of LLaVA-Video-178K in thousands by seconds of video (dataset viewer; ActivityNet's, which it does not count, and
# LLaVA-Hound's left out).
VIDEO_ROWS = {(3, 30): 618.0, (30, 60): 274.1, (60, 120): 246.5, (120, 180): 234.3}
# AMI: 9 hours of test speech (arXiv:2210.13352) in 12,643 utterances (edinburghcstr/ami, ihm).
UTTERANCE_S = 9 * 3600 / 12_643
type Draw = Callable[[np.random.Generator], Mapping[str, Any]]


def drawn(rng: np.random.Generator, count: int, **distribution: Any) -> FloatArray:
    """Return independent draws of a distribution as in a workload's YAML ``[count]``."""
    return parse_marginal(distribution, "generated").ppf(rng.random(count))


def lognormal(rng: np.random.Generator, count: int, mean: float, sigma: float, least: float, most: float) -> FloatArray:
    """Return log-normal draws with a mean, before they are clipped ``[count]``."""
    median = mean / exp(sigma**2 / 2)
    return drawn(rng, count, kind="lognormal", median=median, sigma=sigma, min=least, max=most)


def multi_image(rng: np.random.Generator) -> Mapping[str, Any]:
    """Pages with several images; assumed: geometric counts, sides of 150 to 800 pixels, the spread of text."""
    counts = rng.geometric(1 / MMC4_IMAGES, ROWS)
    sides = drawn(rng, 2 * int(counts.sum()), kind="bounded_pareto", alpha=0.5, low=150, high=800)
    text = lognormal(rng, ROWS, MMC4_TOKENS * CHARS_PER_TOKEN, 0.9, 40, 32_000)
    return {"counts": counts, "sides": sides, "text_chars": text}


def documents(rng: np.random.Generator) -> Mapping[str, Any]:
    """Large infographics with all their questions; assumed: median of 2.6 megapixels, twice as high as wide."""
    pixels = drawn(rng, ROWS, kind="lognormal", median=2.6e6, sigma=1.0, min=LEAST_PIXELS, max=MOST_PIXELS)
    ratio = drawn(rng, ROWS, kind="lognormal", median=2.0, sigma=0.5, min=0.4, max=8.0)
    questions = 1 + rng.poisson(QUESTIONS_PER_IMAGE - 1, ROWS)
    sides = np.stack([np.sqrt(pixels / ratio), np.sqrt(pixels * ratio)], axis=1).ravel()
    return {"counts": np.ones(ROWS, np.int64), "sides": sides, "text_chars": 90.0 * questions}


def long_video(rng: np.random.Generator) -> Mapping[str, Any]:
    """Videos of up to three minutes; assumed: even within a class of lengths, three frame sizes, the text."""
    rows = np.array([*VIDEO_ROWS.values()])
    chosen = rng.choice(len(rows), ROWS, p=rows / rows.sum())
    low, high = np.array([*VIDEO_ROWS], np.float64)[chosen].T
    sizes = np.array([[640, 360], [480, 360], [854, 480]])[rng.choice(3, ROWS, p=[0.6, 0.2, 0.2])]
    text = lognormal(rng, ROWS, 500.0, 0.8, 40, 8_000)
    seconds = low + (high - low) * rng.random(ROWS)
    return {"counts": np.zeros(ROWS, np.int64), "frames": sizes, "video_seconds": seconds, "text_chars": text}


def meetings(rng: np.random.Generator) -> Mapping[str, Any]:
    """Utterances of meetings; assumed: log-normal lengths, 15 characters a second."""
    seconds = lognormal(rng, ROWS, UTTERANCE_S, 1.0, 0.2, 40.0)
    return {"counts": np.zeros(ROWS, np.int64), "audio_seconds": seconds, "text_chars": np.maximum(1, 15.0 * seconds)}


TRACES: Mapping[str, Draw] = {
    "multi_image_generated": multi_image,
    "documents_generated": documents,
    "long_video_generated": long_video,
    "meetings_generated": meetings,
}


def table_of(name: str) -> pa.Table:
    """Return a trace, the same at every call."""
    found = TRACES[name](np.random.default_rng([*name.encode()]))
    counts: IntArray = found["counts"]
    frames = found.get("frames")
    sides = np.rint(found.get("sides", np.zeros(0))).astype(np.int32).reshape(-1, 2)
    if frames is not None:
        sides, counts = frames.astype(np.int32), np.ones(ROWS, np.int64)
    offsets = offsets_from_counts(counts).astype(np.int32)
    columns = {
        "sample_id": np.arange(ROWS, dtype=np.int32),
        "n_images": found["counts"].astype(np.int16),
        "image_widths": pa.ListArray.from_arrays(offsets, sides[:, 0].copy()),
        "image_heights": pa.ListArray.from_arrays(offsets, sides[:, 1].copy()),
        "text_chars": np.rint(found["text_chars"]).astype(np.int32),
    }
    for timed in ("audio_seconds", "video_seconds"):
        columns[timed] = pa.array(found.get(timed, [None] * ROWS), pa.float32())
    return pa.table(columns)


def main(arguments: Sequence[str]) -> None:
    """Write all generated traces to a folder."""
    (folder,) = arguments
    for name in TRACES:
        pq.write_table(table_of(name), Path(folder) / f"{name}.parquet", compression="zstd")


if __name__ == "__main__":
    main(sys.argv[1:])
