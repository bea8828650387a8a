"""Sizes of images, sounds and videos by their headers; no pixel, no sample of sound is decoded.

Pillow reads the headers of images (30 formats by one interface, and it is what training decodes them with), libsndfile
(soundfile) those of sounds, FFmpeg (PyAV) those of videos. Each is held to a list of formats, for among what they
take are some that run other programs or open other files.
"""

from __future__ import annotations

import io
import logging
import os
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from PIL import Image, UnidentifiedImageError

from entrain_bench.base.errors import UserError

from ..budget import BUDGET
from ..tokens import MAX_ASPECT_RATIO
from .interface import BadSampleError, Content, Known, Limits, Medium, Reason, Section, over_budget

IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM")
# EXIF: the tag, its values and what they ask for, and those by which an image is shown on its side.
_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ON_ITS_SIDE = frozenset(_TURNS[value] for value in (5, 6, 7, 8))
# Rates of sounds, in Hz: below telephones', above the highest of sound cards.
SOUND_RATES_HZ = (4_000, 768_000)
# What a pixel of a video's frames takes: decoders keep up to 16, of up to 3 bytes a pixel, and one is made RGB. The
# largest of H.264's levels (ITU-T H.264, table A-1: 139,264 macroblocks of 16 x 16) are within the budget.
FRAME_PIXEL_BYTES = 60
# By what the containers begin with; no others are tried, for some are lists of further files.
_HEAD_BYTES = 16
# What may be read to find the streams of a video.
_VIDEO_OPTIONS = {"probesize": str(2**20), "analyzeduration": "0"}
_BUFFER_BYTES = 16 * 1024
# These have opinions on headers, once a file.
logging.getLogger("PIL").setLevel(logging.CRITICAL)
logging.getLogger("libav").setLevel(logging.CRITICAL)


def image_size(medium: Medium, limits: Limits) -> tuple[int, int]:
    """Width and height of an image in pixels, as shown; ``BadSampleError`` for other formats, or beyond a limit."""
    if isinstance(medium, Known):
        width = medium.width
        height = medium.height
    else:
        try:
            with opened_image(medium, limits) as image:
                width, height = image.size
                if turn(image) in _ON_ITS_SIDE:
                    width, height = height, width
        except BadSampleError:
            raise
        except UnidentifiedImageError as error:
            raise BadSampleError(Reason.FORMAT, "no image") from error
        # What plugins raise on bytes that nobody wrote has no common base.
        except Exception as error:
            raise BadSampleError(Reason.HEADER, one_line(error)) from error
    check_sides(width, height, limits)
    return width, height


def turn(image: Image.Image) -> Image.Transpose | None:
    """How an image that is opened, but not loaded, must be turned to be shown: by EXIF, or XMP's copy of it."""
    # Pillow gives the size of a TIFF turned by its own tag.
    if _ORIENTATION in getattr(image, "tag_v2", ()):
        return None
    # A PNG's own method decodes it, to look behind its pixels.
    return _TURNS.get(Image.Image.getexif(image).get(_ORIENTATION, 1))


@contextmanager
def opened_image(medium: Content, limits: Limits) -> Iterator[Image.Image]:
    """An image of any size, not loaded: large ones are ours to refuse, by a limit that says so, not Pillow's."""
    with opened(medium, limits.file_bytes) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = Image.MAX_IMAGE_PIXELS
        Image.MAX_IMAGE_PIXELS = None
        try:
            with Image.open(file, formats=IMAGE_FORMATS) as image:
                yield image
        finally:
            Image.MAX_IMAGE_PIXELS = before


def check_sides(width: int, height: int, limits: Limits) -> None:
    """Raise ``BadSampleError`` for sides that no image has."""
    if width < 1 or height < 1:
        raise BadSampleError(Reason.HEADER, f"{width}x{height} pixels")
    for name, value in (("side_pixels", max(width, height)), ("image_pixels", width * height)):
        if value > getattr(limits, name):
            raise BadSampleError(Reason.LIMIT, f"{width}x{height} pixels, limits.{name}={getattr(limits, name)}")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise BadSampleError(Reason.THIN, f"{width}x{height} pixels, at most {MAX_ASPECT_RATIO:g}")


def check_frame(width: int, height: int) -> None:
    """Raise ``BadSampleError`` for frames of which a decoder cannot keep several."""
    BUDGET.ask(FRAME_PIXEL_BYTES * width * height, f"frames of {width}x{height} pixels", over_budget)


def audio_seconds(medium: Medium, limits: Limits) -> float:
    """Length of a sound in seconds; ``BadSampleError`` for a format that libsndfile lacks, or beyond a limit."""
    if isinstance(medium, Known):
        return _checked_seconds(medium.seconds, limits)
    soundfile = library("soundfile")
    with opened(medium, limits.file_bytes, whole=False) as file:
        try:
            info = soundfile.info(file)
        except soundfile.LibsndfileError as error:
            raise BadSampleError(Reason.FORMAT, f"no sound: {error.error_string}") from error
        except Exception as error:
            raise BadSampleError(Reason.HEADER, one_line(error)) from error
    return _checked_seconds(info.frames / checked_rate(info.samplerate), limits)


def checked_rate(rate_hz: int) -> int:
    """The rate of a sound in Hz; ``BadSampleError`` for one that no sound has."""
    low, high = SOUND_RATES_HZ
    if not low <= rate_hz <= high:
        raise BadSampleError(Reason.LIMIT, f"{rate_hz} Hz, sounds have from {low} to {high} Hz")
    return int(rate_hz)


def video_header(medium: Medium, limits: Limits) -> Known:
    """Length and frame size of a video, 0 if not stated; ``BadSampleError`` for other formats, or beyond a limit."""
    if isinstance(medium, Known):
        known = medium
    else:
        try:
            with opened_video(medium, limits) as video:
                stream = video.streams.video[0]
                seconds = (video.duration or 0) / library("av").time_base
                if stream.duration:
                    seconds = float(stream.duration * stream.time_base)
                known = Known(int(stream.width), int(stream.height), seconds)
        except (BadSampleError, UserError):
            raise
        except Exception as error:
            raise BadSampleError(Reason.HEADER, one_line(error)) from error
    if known.width or known.height:
        check_sides(known.width, known.height, limits)
        check_frame(known.width, known.height)
    _checked_seconds(known.seconds, limits)
    return known


@contextmanager
def opened_video(medium: Content, limits: Limits) -> Iterator[Any]:
    """A video in FFmpeg's container; ``BadSampleError`` for another than those that are known."""
    av = library("av")
    with opened(medium, limits.file_bytes, whole=False) as file:
        container = _container_format(file.read(_HEAD_BYTES))
        file.seek(0)
        with av.open(file, format=container, options=_VIDEO_OPTIONS) as video:
            # A frame larger than the header says would be made before it can be looked at.
            most = str(BUDGET.num_bytes // FRAME_PIXEL_BYTES)
            video.streams.video[0].codec_context.options = {"max_pixels": most}
            yield video


def _container_format(head: bytes) -> str:
    """FFmpeg's name of a video's container, by what it begins with."""
    if head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "mov"
    if head[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        return "avi"
    raise BadSampleError(Reason.FORMAT, "no MP4, QuickTime, Matroska, WebM or AVI")


def _checked_seconds(seconds: float, limits: Limits) -> float:
    if not seconds > 0:
        raise BadSampleError(Reason.HEADER, f"{seconds} seconds")
    if seconds > limits.seconds:
        raise BadSampleError(Reason.LIMIT, f"{seconds:g} s, limits.seconds={limits.seconds:g}")
    return float(seconds)


@contextmanager
def opened(medium: Content, most_bytes: int, whole: bool = True) -> Iterator[IO[bytes]]:
    """A file of the medium's bytes; at most ``most_bytes`` if its reader may read it ``whole``."""
    if isinstance(medium, bytes):
        _check_bytes(len(medium), most_bytes)
        yield io.BytesIO(medium)
        return
    if isinstance(medium, Section):
        if whole:
            _check_bytes(medium.size, most_bytes)
        yield io.BufferedReader(_SectionFile(medium), _BUFFER_BYTES)
        return
    try:
        file = medium.open("rb", buffering=_BUFFER_BYTES)
    except OSError as error:
        raise BadSampleError(Reason.MISSING, f"{medium.name}: {error.strerror}") from error
    with file:
        if whole:
            _check_bytes(os.fstat(file.fileno()).st_size, most_bytes)
        yield file


def _check_bytes(size: int, most: int) -> None:
    if size > most:
        raise BadSampleError(Reason.LIMIT, f"{size} bytes, limits.file_bytes={most}")


class _SectionFile(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, section: Section) -> None:
        self._section = section
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._section.size}[whence]
        self._place = max(0, base + offset)
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        wanted = max(0, min(len(buffer), self._section.size - self._place))
        read = os.pread(_file(self._section.path).fileno(), wanted, self._section.offset + self._place)
        buffer[: len(read)] = read
        self._place += len(read)
        return len(read)


@lru_cache(maxsize=1)
def _file(path: Path) -> IO[bytes]:
    """The file whose parts are being read; members of an archive come one after another."""
    return path.open("rb")


def library(name: str) -> Any:
    """A module of the ``data`` extra; ``UserError`` if it is not installed."""
    try:
        return __import__(name)
    except ImportError as error:
        raise UserError(f"{name}: not installed. Run pip install -e '.[data]'") from error


def one_line(error: Exception) -> str:
    """Return a short text of an error."""
    text = str(error) if not isinstance(error, struct.error | IndexError) else "ends too early"
    return " ".join(text.split())[:120] or type(error).__name__
