"""Sizes by headers, as images are shown, in bounded memory."""

import io
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, PngImagePlugin

from entrain_bench_workloads.dataset.fields import Known
from entrain_bench_workloads.dataset.media import header
from entrain_bench_workloads.dataset.source import BadSampleError, Limits, Reason
from support.datasets import (
    image_bytes,
    png_of,
    video_bytes,
    wav_bytes,
)

LIMITS = Limits()


def image_size(content: bytes, limits: Limits) -> tuple[int, int]:
    known = header("images", content, limits)
    return known.width, known.height


def audio_seconds(content: bytes | Known, limits: Limits) -> float:
    return header("audio", content, limits).seconds


def video_header(content: bytes | Known, limits: Limits) -> Known:
    return header("video", content, limits)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM"])
def test_an_image_has_the_size_of_its_header(kind: str) -> None:
    assert image_size(image_bytes(37, 61, kind), LIMITS) == (37, 61)


def test_a_photograph_on_its_side_is_turned() -> None:
    assert image_size(image_bytes(40, 30, orientation=6), LIMITS) == (30, 40)
    assert image_size(image_bytes(40, 30, orientation=3), LIMITS) == (40, 30)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", Reason.FORMAT),
        (b"<html>not found</html>", Reason.FORMAT),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", Reason.FORMAT),
        (image_bytes(90, 90)[:40], Reason.HEADER),
        (png_of(2**31 - 1, 2**31 - 1), Reason.LIMIT),
        (png_of(100_000, 9), Reason.THIN),
        (png_of(100_001, 1000), Reason.LIMIT),
        (png_of(0, 5), Reason.FORMAT),
    ],
)
def test_what_is_no_image_says_why(content: bytes, reason: Reason) -> None:
    with pytest.raises(BadSampleError) as error:
        image_size(content, LIMITS)
    assert error.value.reason is reason


def test_an_image_that_is_large_but_allowed_is_no_bomb() -> None:
    assert image_size(png_of(30_000, 30_000), LIMITS) == (30_000, 30_000)


def test_limits_are_what_is_configured() -> None:
    with pytest.raises(BadSampleError, match=r"100x50 pixels, limits.side_pixels=99"):
        image_size(image_bytes(100, 50), replace(LIMITS, side_pixels=99))
    with pytest.raises(BadSampleError, match=r"bytes, limits.file_bytes=100"):
        image_size(image_bytes(100, 50), replace(LIMITS, file_bytes=100))


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(["JPEG", "PNG", "WEBP", "GIF", "TIFF", "AVIF", "JPEG2000", "PPM"]),
    cut=st.integers(0, 400),
    place=st.integers(0, 200),
    byte=st.integers(0, 255),
)
def test_no_damage_is_more_than_a_bad_sample(kind: str, cut: int, place: int, byte: int) -> None:
    content = bytearray(image_bytes(64, 48, kind))
    content[min(place, len(content) - 1)] = byte
    try:
        width, height = image_size(bytes(content[: cut or None]), LIMITS)
    except BadSampleError:
        return
    assert width >= 1
    assert height >= 1


def test_a_sound_is_as_long_as_its_header_says() -> None:
    assert audio_seconds(wav_bytes(1.25), LIMITS) == 1.25
    assert audio_seconds(Known(seconds=3.5), LIMITS) == 3.5
    with pytest.raises(BadSampleError, match="no sound"):
        audio_seconds(image_bytes(9, 9), LIMITS)
    with pytest.raises(BadSampleError, match=r"2 s, limits.seconds=1"):
        audio_seconds(wav_bytes(2.0), replace(LIMITS, seconds=1.0))
    with pytest.raises(BadSampleError, match=r"0\.0 seconds"):
        audio_seconds(wav_bytes(0.0), LIMITS)


@pytest.mark.parametrize("kind", ["mp4", "mov", "matroska", "avi"])
def test_a_video_is_as_its_header_says(kind: str) -> None:
    known = video_header(video_bytes(64, 48, 25, kind=kind), LIMITS)
    assert (known.width, known.height) == (64, 48)
    assert known.seconds == pytest.approx(2.5, abs=0.11)


def test_lists_of_other_files_are_no_videos() -> None:
    for content in (b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1/x.ts\n", b"ffconcat version 1.0\nfile /etc/passwd\n", b""):
        with pytest.raises(BadSampleError) as error:
            video_header(content, LIMITS)
        assert error.value.reason is Reason.FORMAT
    with pytest.raises(BadSampleError) as error:
        video_header(video_bytes(64, 48, 5)[:300], LIMITS)
    assert error.value.reason is Reason.HEADER


# What each orientation asks for, as EXIF 2.32 says where the first row and the first column are shown.
SHOWN: dict[int, Any] = {
    1: lambda rows: rows,
    2: lambda rows: rows[:, ::-1],
    3: lambda rows: rows[::-1, ::-1],
    4: lambda rows: rows[::-1],
    5: lambda rows: rows.swapaxes(0, 1),
    6: lambda rows: rows[::-1].swapaxes(0, 1),
    7: lambda rows: rows[::-1, ::-1].swapaxes(0, 1),
    8: lambda rows: rows[:, ::-1].swapaxes(0, 1),
}
PIXELS: NDArray[np.uint8] = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)


def xmp(orientation: int) -> bytes:
    return f'<x:xmpmeta><rdf:Description tiff:Orientation="{orientation}"/></x:xmpmeta>'.encode()


def exif(orientation: int) -> bytes:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes()


def saved(kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(PIXELS).save(buffer, kind, **options)
    return buffer.getvalue()


def png_with(key: str, value: str) -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add_itxt(key, value)
    return saved("PNG", pnginfo=info)


def raw_profile(orientation: int) -> str:
    content = exif(orientation)
    return f"\nexif\n{len(content):8}\n{content.hex()}\n"


MADE: dict[str, Any] = {
    "PNG exif": lambda turned: saved("PNG", exif=exif(turned)),
    "PNG xmp": lambda turned: png_with("XML:com.adobe.xmp", xmp(turned).decode()),
    "PNG profile": lambda turned: png_with("Raw profile type exif", raw_profile(turned)),
    "WEBP exif": lambda turned: saved("WEBP", lossless=True, exif=exif(turned)),
    "WEBP xmp": lambda turned: saved("WEBP", lossless=True, xmp=xmp(turned)),
    "TIFF exif": lambda turned: saved("TIFF", exif=exif(turned)),
    "TIFF xmp": lambda turned: saved("TIFF", tiffinfo={700: xmp(turned)}),
}


def check_shown(content: bytes, orientation: int) -> None:
    expected = SHOWN[orientation](PIXELS)
    assert image_size(content, LIMITS) == expected.shape[1::-1]


@pytest.mark.parametrize("made", MADE)
def test_images_are_shown_as_their_header_asks(made: str) -> None:
    for orientation in SHOWN if made.startswith("PNG") else (3, 6):
        check_shown(MADE[made](orientation), orientation)


@pytest.mark.parametrize("rate", [1, 3_999, 768_001, 400_000_009])
def test_a_rate_that_no_sound_has_is_refused_wherever_it_is_read(rate: int) -> None:
    content = bytearray(wav_bytes(0.5))
    content[24:28] = struct.pack("<I", rate)
    with pytest.raises(BadSampleError) as error:
        audio_seconds(bytes(content), LIMITS)
    assert error.value.reason is Reason.LIMIT


def test_frames_that_a_decoder_cannot_keep_are_refused() -> None:
    assert video_header(Known(8192, 4320, 1.0), LIMITS).width == 8192
    with pytest.raises(BadSampleError, match=r"frames of 8192x8192 pixels would take 3.8 GiB") as error:
        video_header(Known(8192, 8192, 1.0), LIMITS)
    assert error.value.reason is Reason.LIMIT
