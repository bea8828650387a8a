"""Pictures as cameras leave them, made on the spot: a Parquet file of JPEGs and captions, from a seed."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

QUALITY = 85
CAPTION_CHARS = 120
ROW_GROUP = 32
# Octaves of the texture that pictures are cut from: each twice as fine, and as strong as this share of the one before.
OCTAVES, DECAY = 9, 0.62
# What sensors add to each colour, of 255.
NOISE = 8.0

_SCHEMA = pa.schema(
    [
        ("images", pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))),
        ("texts", pa.list_(pa.struct([("user", pa.string()), ("assistant", pa.string())]))),
    ]
)

# Pictures that are returned, to be decoded.
KEPT = 16


def write_pictures(path: Path, num: int, width: int, height: int, seed: int) -> tuple[int, list[bytes]]:
    """Write rows of a picture (pixels) and a caption; returns all pictures' bytes, and the first ``KEPT`` pictures."""
    rng = np.random.default_rng(seed)
    texture = _texture(rng, width, height)
    total, first, images, texts = 0, list[bytes](), [], []
    with pq.ParquetWriter(path, _SCHEMA) as file:
        for number in range(1, num + 1):
            top, left = rng.integers(height), rng.integers(width)
            cut = texture[top : top + height, left : left + width]
            buffer = io.BytesIO()
            Image.fromarray(cut[:, :: rng.choice((-1, 1))]).save(buffer, "JPEG", quality=QUALITY)
            content = buffer.getvalue()
            total += len(content)
            first += [content] if number <= KEPT else []
            images.append([{"bytes": content, "path": None}])
            letters = rng.integers(ord("a"), ord("z") + 1, CAPTION_CHARS, np.uint8)
            texts.append([{"user": "", "assistant": letters.tobytes().decode()}])
            if number % ROW_GROUP == 0 or number == num:
                file.write_table(pa.table({"images": images, "texts": texts}, _SCHEMA))
                images, texts = [], []
    return total, first


def _texture(rng: np.random.Generator, width: int, height: int) -> NDArray[np.uint8]:
    """A texture twice as wide and high as a picture, rougher at smaller scales ``[rows, columns, 3]``."""
    size = (2 * width, 2 * height)
    total = np.zeros((size[1], size[0], 3), np.float32)
    for octave in range(OCTAVES):
        side = 2 ** (octave + 1)
        coarse = rng.integers(0, 256, (side, side, 3), np.uint8)
        fine = np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC), np.float32)
        total += DECAY**octave * (fine - 127.5)
    total *= 127.5 / np.abs(total).max()
    total += rng.normal(127.5, NOISE, total.shape).astype(np.float32)
    return total.clip(0, 255).astype(np.uint8)
