"""Sizes of images, sounds and videos by their headers: Pillow, libsndfile (soundfile) and FFmpeg (PyAV).

Each library is held to a list of formats, because some formats run programs or open other files.
"""

from __future__ import annotations

import io
import logging
import os
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
from .interface import BadSampleError, Content, Known, Limits, Medium, Reason, Section, one_line, over_budget

IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM")
# EXIF: the tag of the orientation, its values and the turns that they ask for.
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
# Rates of sounds, in Hz: below telephones, above the highest of sound cards.
SOUND_RATES_HZ = (4_000, 768_000)
# Bytes per pixel of a video's frames: decoders keep up to 16 frames of up to 3 bytes, and one is made RGB. The
# largest of H.264's levels (ITU-T H.264, table A-1: 139,264 macroblocks of 16 x 16) are within the budget.
FRAME_PIXEL_BYTES = 60
# FFmpeg tries no containers but these, because some are lists of other files; starts of the files.
_HEAD_BYTES = 16
_MP4 = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")
# What may be read to find the streams of a video.
_VIDEO_OPTIONS = {"probesize": str(2**20), "analyzeduration": "0"}
_BUFFER_BYTES = 16 * 1024
# They comment on headers, file by file.
logging.getLogger("PIL").setLevel(logging.CRITICAL)
logging.getLogger("libav").setLevel(logging.CRITICAL)


@contextmanager
def failing_as(reason: Reason) -> Iterator[None]:
    """Turn any error of a library on damaged bytes, which have no common base, into ``BadSampleError``."""
    try:
        yield
    except (BadSampleError, UserError):
        raise
    except Exception as error:
        raise BadSampleError(reason, one_line(error)) from error


def image_size(medium: Medium, limits: Limits) -> tuple[int, int]:
    """Return width and height of an image in pixels, as shown; ``BadSampleError`` for other formats and large ones."""
    if isinstance(medium, Known):
        width = medium.width
        height = medium.height
    else:
        with failing_as(Reason.HEADER), opened_image(medium, limits) as image:
            width, height = image.size
            if turn(image) in _ON_ITS_SIDE:
                width, height = height, width
    _check_sides(width, height, limits)
    return width, height


def turn(image: Image.Image) -> Image.Transpose | None:
    """Return how an image that is not loaded must be turned to be shown, by EXIF or XMP's copy of it."""
    # Pillow turns the size of a TIFF by its own tag.
    if _ORIENTATION in getattr(image, "tag_v2", ()):
        return None
    # The method of a PNG decodes it.
    return _TURNS.get(Image.Image.getexif(image).get(_ORIENTATION, 1))


@contextmanager
def opened_image(medium: Content, limits: Limits) -> Iterator[Image.Image]:
    """Open an image without loading it. ``limits`` refuse large images, not Pillow's own limit."""
    with opened(medium, limits.file_bytes) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = Image.MAX_IMAGE_PIXELS
        Image.MAX_IMAGE_PIXELS = None
        try:
            with Image.open(file, formats=IMAGE_FORMATS) as image:
                yield image
        except UnidentifiedImageError as error:
            raise BadSampleError(Reason.FORMAT, "no image") from error
        finally:
            Image.MAX_IMAGE_PIXELS = before


def _check_sides(width: int, height: int, limits: Limits) -> None:
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
    """Return the length of a sound in seconds; ``BadSampleError`` for an unknown format, or beyond a limit."""
    if isinstance(medium, Known):
        return _checked_seconds(medium.seconds, limits)
    with opened_sound(medium, limits, Reason.HEADER) as sound:
        return _checked_seconds(sound.frames / sound.samplerate, limits)


@contextmanager
def opened_sound(medium: Content, limits: Limits, reason: Reason) -> Iterator[Any]:
    """Open a sound in soundfile; ``BadSampleError`` with a reason, and for a rate beyond ``SOUND_RATES_HZ``."""
    soundfile = library("soundfile")
    with opened(medium, limits.file_bytes, whole=False) as file, failing_as(reason):
        try:
            sound = soundfile.SoundFile(file)
        except soundfile.LibsndfileError as error:
            raise BadSampleError(Reason.FORMAT, f"no sound: {error.error_string}") from error
        with sound:
            low, high = SOUND_RATES_HZ
            if not low <= sound.samplerate <= high:
                what = f"{sound.samplerate} Hz, sounds have from {low} to {high} Hz"
                raise BadSampleError(Reason.LIMIT, what)
            yield sound


def video_header(medium: Medium, limits: Limits) -> Known:
    """Return length and frame size of a video, 0 if not stated; ``BadSampleError`` for unknown formats and limits."""
    if isinstance(medium, Known):
        known = medium
    else:
        with failing_as(Reason.HEADER), opened_video(medium, limits) as video:
            stream = video.streams.video[0]
            seconds = (video.duration or 0) / library("av").time_base
            if stream.duration:
                seconds = float(stream.duration * stream.time_base)
            known = Known(int(stream.width), int(stream.height), seconds)
    if known.width or known.height:
        _check_sides(known.width, known.height, limits)
        check_frame(known.width, known.height)
    _checked_seconds(known.seconds, limits)
    return known


@contextmanager
def opened_video(medium: Content, limits: Limits) -> Iterator[Any]:
    """Open a video in FFmpeg's container; ``BadSampleError`` for a container that is not known."""
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
    """Return FFmpeg's name of a container, by the start of the file."""
    if head[4:8] in _MP4:
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
    """Open a medium's bytes as a file; of at most ``most_bytes`` if its reader may read it ``whole``."""
    with _file_of(medium) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size > most_bytes and (whole or isinstance(medium, bytes)):
            raise BadSampleError(Reason.LIMIT, f"{size} bytes, limits.file_bytes={most_bytes}")
        yield file


def _file_of(medium: Content) -> IO[bytes]:
    if isinstance(medium, bytes):
        return io.BytesIO(medium)
    if isinstance(medium, Section):
        return io.BufferedReader(_SectionFile(medium), _BUFFER_BYTES)
    try:
        return medium.open("rb", buffering=_BUFFER_BYTES)
    except OSError as error:
        raise BadSampleError(Reason.MISSING, f"{medium.name}: {error.strerror}") from error


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

    def readinto(self, buffer: Any) -> int:
        wanted = max(0, min(len(buffer), self._section.size - self._place))
        read = os.pread(_file(self._section.path).fileno(), wanted, self._section.offset + self._place)
        buffer[: len(read)] = read
        self._place += len(read)
        return len(read)


@lru_cache(maxsize=1)
def _file(path: Path) -> IO[bytes]:
    """Return the open archive; the members of an archive come one after another."""
    return path.open("rb")


def library(name: str) -> Any:
    """Import a module of the extra ``data``; ``UserError`` if it is not installed."""
    try:
        return __import__(name)
    except ImportError as error:
        raise UserError(f"{name}: not installed. Run pip install -e '.[data]'") from error
