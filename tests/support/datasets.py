"""Data sets made on the spot: images of given sizes, and files that hold them."""

import io
import json
import struct
import tarfile
import wave
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from entrain_bench_workloads.dataset import scan as scan_module
from entrain_bench_workloads.dataset.fields import RawSample
from entrain_bench_workloads.dataset.report import ScanReport
from entrain_bench_workloads.dataset.scan import ShardTask, scan_shard
from entrain_bench_workloads.dataset.source import BadSampleError, Limits, Shard

IMAGES = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
TURNS = pa.list_(pa.struct([("user", pa.string()), ("assistant", pa.string())]))


@cache
def image_bytes(width: int, height: int, kind: str = "JPEG", orientation: int = 0) -> bytes:
    """A grey image of a size."""
    return _encoded(Image.new("RGB", (width, height), (90, 90, 90)), kind, orientation)


def png_of(width: int, height: int, pixels: bytes = b"", bits: int = 8, colors: int = 2) -> bytes:
    """A PNG of a size and of compressed pixels, which need not fit it."""
    header = struct.pack(">IIBBBBB", width, height, bits, colors, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*chunk) for chunk in chunks)


def png_chunk(kind: bytes, content: bytes) -> bytes:
    """A part of a PNG."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _encoded(image: Image.Image, kind: str, orientation: int) -> bytes:
    buffer = io.BytesIO()
    exif = Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    image.save(buffer, kind, exif=exif)
    return buffer.getvalue()


def wav_bytes(seconds: float, rate: int = 16000) -> bytes:
    """Silence of a length."""
    return _wave(np.zeros((round(seconds * rate), 1)), rate)


def _wave(frames: np.ndarray, rate: int) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(frames.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(frames.astype("<i2").tobytes())
    return buffer.getvalue()


def video_bytes(width: int, height: int, frames: int, rate: int = 10, kind: str = "mp4", shades: bool = False) -> bytes:
    """Grey frames of a size; of rising shades, frame n of shade 6 n."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(
                np.full((height, width, 3), 6 * number if shades else 90, np.uint8), format="rgb24"
            )
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def write_finevision(path: Path, rows: Sequence[tuple[Sequence[bytes], Sequence[str]]], row_group: int = 100) -> None:
    """Parquet as FineVision's: images, and texts as turns whose user says nothing."""
    table = pa.table(
        {
            "images": pa.array([[{"bytes": image, "path": None} for image in images] for images, _ in rows], IMAGES),
            "texts": pa.array([[{"user": "", "assistant": text} for text in texts] for _, texts in rows], TURNS),
        }
    )
    pq.write_table(table, path, row_group_size=row_group)


def write_tar(path: Path, members: Sequence[tuple[str, bytes]], mode: str = "w") -> None:
    """A tar file of members in their order."""
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def write_jsonl(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """A record a line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def run_here(_: object, tasks: Iterable[ShardTask], *__: object) -> Iterator[tuple[ShardTask, ScanReport | str]]:
    """Run tasks like ``run_parallel``, in this process."""
    return ((task, scan_shard(task)) for task in tasks)


def samples_of(source: Any, shard: Shard, limits: Limits) -> Iterator[RawSample | BadSampleError]:
    """Samples of a shard, as a scan reads them."""
    for row in source.rows(shard, limits):
        try:
            yield source.sample(row, source.folder(shard))
        except BadSampleError as error:
            yield error


def write_repeated(path: Path, entries: int, column: str = "texts", value: str | int = "a text") -> Path:
    """A row whose list has one value again and again, in a kilobyte however many there are."""
    values = pa.DictionaryArray.from_arrays(pa.array(np.zeros(entries, np.int8)), pa.array([value]))
    lists = pa.ListArray.from_arrays(pa.array([0, entries], pa.int32()), values)
    pq.write_table(pa.table({column: lists, "text_tokens": [1]}), path, compression="zstd")
    return path


def scan_report(source: Any, output: Path, tokenizer: str | None = None) -> ScanReport:
    """Result of a scan in this process."""
    with patch.object(scan_module, "run_parallel", run_here):
        return scan_module.Scan(source=source, workers=1, tokenizer=tokenizer).run(output)
