import struct
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench_workloads.dataset.interface import BadSampleError, Known, Limits, Reason, Section
from entrain_bench_workloads.dataset.media import audio_seconds, image_size, video_header
from support.datasets import image_bytes, video_bytes, wav_bytes

LIMITS = Limits()


def png_header(width: int, height: int) -> bytes:
    """A PNG that states a size, and ends there."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IDAT"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM"])
def test_an_image_has_the_size_of_its_header(kind: str) -> None:
    assert image_size(image_bytes(37, 61, kind), LIMITS) == (37, 61)


def test_a_photograph_on_its_side_is_turned() -> None:
    assert image_size(image_bytes(40, 30, orientation=6), LIMITS) == (30, 40)
    assert image_size(image_bytes(40, 30, orientation=3), LIMITS) == (40, 30)


def test_a_file_and_a_part_of_one_say_the_same(tmp_path: Path) -> None:
    content = image_bytes(120, 90, "WEBP")
    (tmp_path / "whole").write_bytes(content)
    (tmp_path / "part").write_bytes(b"before" + content + b"after")
    assert image_size(tmp_path / "whole", LIMITS) == (120, 90)
    assert image_size(Section(tmp_path / "part", 6, len(content)), LIMITS) == (120, 90)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", Reason.FORMAT),
        (b"<html>not found</html>", Reason.FORMAT),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", Reason.FORMAT),
        (image_bytes(90, 90)[:40], Reason.HEADER),
        (png_header(2**31 - 1, 2**31 - 1), Reason.LIMIT),
        (png_header(100_000, 9), Reason.THIN),
        (png_header(100_001, 1000), Reason.LIMIT),
        (png_header(0, 5), Reason.FORMAT),
    ],
)
def test_what_is_no_image_says_why(content: bytes, reason: Reason) -> None:
    with pytest.raises(BadSampleError) as error:
        image_size(content, LIMITS)
    assert error.value.reason is reason


def test_an_image_that_is_large_but_allowed_is_no_bomb() -> None:
    assert image_size(png_header(30_000, 30_000), LIMITS) == (30_000, 30_000)


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
