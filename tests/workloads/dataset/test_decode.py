"""Images are turned as their headers were measured; sounds of any rate take bounded memory."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zlib
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, PngImagePlugin
from scipy.signal import resample_poly

from entrain_bench_workloads.dataset import decode as decode_module
from entrain_bench_workloads.dataset.decode import decoded_image, decoded_sound, steps_between
from entrain_bench_workloads.dataset.interface import BadSampleError, Limits, Reason
from entrain_bench_workloads.dataset.media import audio_seconds, image_size
from support.datasets import sound_bytes, wav_bytes

LIMITS = Limits()
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


def png_exif_behind(orientation: int) -> bytes:
    """A PNG whose EXIF stands between its pixels and its end."""
    content, body = saved("PNG"), b"eXIf" + exif(orientation).removeprefix(b"Exif\0\0")
    end = content.rindex(b"IEND") - 4
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    return content[:end] + chunk + content[end:]


def raw_profile(orientation: int) -> str:
    content = exif(orientation)
    return f"\nexif\n{len(content):8}\n{content.hex()}\n"


def check_shown(content: bytes, orientation: int) -> None:
    expected = SHOWN[orientation](PIXELS)
    with decoded_image(content, LIMITS) as image:
        np.testing.assert_array_equal(np.asarray(image), expected)
    assert image_size(content, LIMITS) == expected.shape[1::-1]


@pytest.mark.parametrize("orientation", SHOWN)
@pytest.mark.parametrize("place", ["exif", "xmp", "profile"])
def test_images_are_shown_as_their_header_asks(place: str, orientation: int) -> None:
    made = {
        "exif": lambda: saved("PNG", exif=exif(orientation)),
        "xmp": lambda: png_with("XML:com.adobe.xmp", xmp(orientation).decode()),
        "profile": lambda: png_with("Raw profile type exif", raw_profile(orientation)),
    }
    check_shown(made[place](), orientation)


@pytest.mark.parametrize("orientation", [3, 6])
@pytest.mark.parametrize("place", ["exif", "xmp"])
@pytest.mark.parametrize("kind", ["WEBP", "TIFF"])
def test_other_formats_are_turned_likewise(kind: str, place: str, orientation: int) -> None:
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    if place == "exif":
        options["exif"] = exif(orientation)
    elif kind == "WEBP":
        options["xmp"] = xmp(orientation)
    else:
        options["tiffinfo"] = {700: xmp(orientation)}
    check_shown(saved(kind, **options), orientation)


def test_a_photograph_that_xmp_alone_turns_is_as_large_as_it_was_measured() -> None:
    content = saved("JPEG", xmp=xmp(6))
    assert image_size(content, LIMITS) == (20, 30)
    with decoded_image(content, LIMITS) as image:
        assert image.size == (20, 30)


def test_what_stands_behind_the_pixels_turns_nothing() -> None:
    """A scan reads headers, and does not look there."""
    check_shown(png_exif_behind(6), 1)


def test_an_image_that_is_not_as_large_as_its_header_says_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_module, "image_size", lambda *_: (31, 20))
    with (
        pytest.raises(BadSampleError, match=r"its header says 31x20 pixels, it has 30x20$") as error,
        decoded_image(saved("PNG"), LIMITS),
    ):
        pass
    assert error.value.reason is Reason.CHANGED


@pytest.mark.parametrize(
    ("rate", "steps"),
    [
        (8_000, (2, 1)),
        (11_025, (640, 441)),
        (11_127, (16_000, 11_127)),
        (22_050, (320, 441)),
        (44_100, (160, 441)),
        (48_000, (1, 3)),
        (96_000, (1, 6)),
        (768_000, (1, 48)),
    ],
)
def test_usual_rates_are_exact(rate: int, steps: tuple[int, int]) -> None:
    assert steps_between(rate) == steps


@given(rate=st.integers(4_000, 768_000))
def test_any_rate_takes_small_steps_to_nearly_the_right_one(rate: int) -> None:
    up, down = steps_between(rate)
    assert max(up, down) <= 2**14
    assert abs(Fraction(up, down) / Fraction(16_000, rate) - 1) < Fraction(31, 10**6)


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_sounds_of_usual_rates_are_what_scipy_makes_of_them(rate: int) -> None:
    content = sound_bytes(2.5, 440.0, rate)
    frames = np.frombuffer(content[44:], "<i2").reshape(-1, 2)
    part = (frames[round(0.5 * rate) : 2 * rate] / np.float32(2**15)).astype(np.float32).mean(axis=1)
    expected = resample_poly(part, *Fraction(16_000, rate).as_integer_ratio())
    np.testing.assert_array_equal(decoded_sound(content, LIMITS, 0.5, 2.0), expected)


def test_an_awkward_rate_is_heard_as_it_was_within_little_memory() -> None:
    """The exact filter of 767957 Hz has 15 million taps, 123 MB."""
    decoded_sound(wav_bytes(0.1, 8_000), LIMITS, 0, 1)
    content = sound_bytes(0.25, 440.0, 767_957)
    tracemalloc.start()
    found = decoded_sound(content, LIMITS, 0, 30)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * 2**20
    tone = 0.75 * 20000 / 2**15 * np.sin(2 * np.pi * 440 * np.arange(len(found)) / 16_000)
    assert abs(len(found) - 4000) <= 1
    np.testing.assert_allclose(found[100:-100], tone[100:-100], atol=2e-3)


@pytest.mark.parametrize("rate", [1, 3_999, 768_001, 400_000_009])
def test_a_rate_that_no_sound_has_is_refused_wherever_it_is_read(rate: int) -> None:
    content = bytearray(wav_bytes(0.5))
    content[24:28] = struct.pack("<I", rate)
    for read in (lambda: audio_seconds(bytes(content), LIMITS), lambda: decoded_sound(bytes(content), LIMITS, 0, 30)):
        with pytest.raises(BadSampleError, match=rf": {rate} Hz, sounds have from 4000 to 768000 Hz$") as error:
            read()
        assert error.value.reason is Reason.LIMIT


def test_behind_the_end_of_a_sound_there_is_silence_as_long_as_lengths_are_rounded() -> None:
    content = wav_bytes(1.0, 8_000)
    assert decoded_sound(content, LIMITS, 1.0, 2.0).tolist() == []
    assert decoded_sound(content, LIMITS, 1.1, 2.0).tolist() == []
    assert len(decoded_sound(content, LIMITS, 0.9, 2.0)) == 1600
    with pytest.raises(BadSampleError, match=r"ends before 1.11 s$"):
        decoded_sound(content, LIMITS, 1.11, 2.0)


def test_memory_that_is_not_there_is_a_bad_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: object) -> None:
        raise MemoryError("Unable to allocate 59.6 GiB")

    monkeypatch.setattr(decode_module, "_resampled", without)
    with pytest.raises(BadSampleError, match=r"cannot be decoded: Unable to allocate 59.6 GiB"):
        decoded_sound(wav_bytes(0.1, 8_000), LIMITS, 0, 1)
