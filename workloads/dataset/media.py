"""Sizes of images, sounds and videos by their headers: Pillow, libsndfile (soundfile) and FFmpeg (PyAV).

Each library is held to a list of formats, because some formats run programs or open other files.
"""

import io
import logging
import os
import re
import tarfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from PIL import Image, UnidentifiedImageError

from entrain_bench.base.errors import UserError

from ..budget import BUDGET
from ..tokens import MAX_ASPECT_RATIO
from .fields import Content, Known, Medium, Section
from .source import BadSampleError, Limits, Reason, one_line, over_budget

IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM")
# EXIF's tag of the orientation, and its values for images that lie on their side.
_ORIENTATION = 0x0112
_ON_ITS_SIDE = (5, 6, 7, 8)
# Rates of sounds, in Hz: below telephones, above the highest of sound cards.
SOUND_RATES_HZ = (4_000, 768_000)
# Bytes per pixel of a video's frames: decoders keep up to 16 frames of up to 3 bytes, and one is made RGB. The
# largest of H.264's levels (ITU-T H.264, table A-1: 139,264 macroblocks of 16 x 16) are within the budget.
FRAME_PIXEL_BYTES = 60
# FFmpeg tries no containers but these, because some are lists of other files; starts of the files.
_HEAD_BYTES = 16
_CONTAINERS = {
    "mov": re.compile(b".{4}(ftyp|moov|mdat|wide|free|skip)", re.DOTALL),
    "matroska": re.compile(b"\x1aE\xdf\xa3"),
    "avi": re.compile(b"RIFF.{4}AVI ", re.DOTALL),
}
# Bytes that may be read to find the streams of a video.
_VIDEO_OPTIONS = {"probesize": str(2**20), "analyzeduration": "0"}
# They comment on headers, file by file.
warnings.filterwarnings("ignore", module="PIL")
logging.getLogger("PIL").setLevel(logging.CRITICAL)
logging.getLogger("libav").setLevel(logging.CRITICAL)
# Limits of a scan refuse large images.
Image.MAX_IMAGE_PIXELS = None


@contextmanager
def failing_as(reason: Reason) -> Iterator[None]:
    """Turn any error of a library on damaged bytes, which have no common base, into ``BadSampleError``."""
    try:
        yield
    except (BadSampleError, UserError):
        raise
    except Exception as error:
        raise BadSampleError(reason, one_line(error)) from error


def header(kind: str, medium: Medium, limits: Limits) -> Known:
    """Return the sizes of a medium by its header, those of a video 0 if not stated; an image's are as shown.

    ``BadSampleError`` for unknown formats, damage and sizes beyond a limit.
    """
    known = medium
    if not isinstance(medium, Known):
        with failing_as(Reason.HEADER):
            known = _read_header(kind, medium, limits)
    assert isinstance(known, Known)
    sides = (known.width, known.height)
    what = f"{known.width}x{known.height} pixels"
    if kind == "images" or (kind == "video" and any(sides)):
        if min(sides) < 1:
            raise BadSampleError(Reason.HEADER, what)
        limits.check("side_pixels", max(sides), what)
        limits.check("image_pixels", known.width * known.height, what)
        if max(sides) > MAX_ASPECT_RATIO * min(sides):
            raise BadSampleError(Reason.THIN, f"{what}, at most {MAX_ASPECT_RATIO:g}")
    if kind == "video":
        check_frame(*sides)
    if kind != "images":
        if not known.seconds > 0:
            raise BadSampleError(Reason.HEADER, f"{known.seconds} seconds")
        limits.check("seconds", known.seconds, f"{known.seconds:g} s")
    return known


def _read_header(kind: str, medium: Content, limits: Limits) -> Known:
    if kind == "images":
        with opened_image(medium, limits) as image:
            # Pillow turns the size of a TIFF by its own tag. The method of a PNG decodes it.
            is_turned = _ORIENTATION in getattr(image, "tag_v2", ())
            on_its_side = not is_turned and Image.Image.getexif(image).get(_ORIENTATION) in _ON_ITS_SIDE
            return Known(*(image.size[::-1] if on_its_side else image.size))
    if kind == "audio":
        with opened_sound(medium, limits) as sound:
            return Known(seconds=sound.frames / sound.samplerate)
    with opened_video(medium, limits) as video:
        stream = video.streams.video[0]
        seconds = (video.duration or 0) / library("av").time_base
        if stream.duration:
            seconds = float(stream.duration * stream.time_base)
        return Known(int(stream.width), int(stream.height), seconds)


@contextmanager
def opened_image(medium: Content, limits: Limits) -> Iterator[Image.Image]:
    """Open an image without loading it."""
    with opened(medium, limits) as file:
        try:
            with Image.open(file, formats=IMAGE_FORMATS) as image:
                yield image
        except UnidentifiedImageError as error:
            raise BadSampleError(Reason.FORMAT, "no image") from error


@contextmanager
def opened_sound(medium: Content, limits: Limits) -> Iterator[Any]:
    """Open a sound in soundfile; ``BadSampleError`` for other formats, and for a rate beyond ``SOUND_RATES_HZ``."""
    soundfile = library("soundfile")
    with opened(medium, limits, whole=False) as file:
        try:
            sound = soundfile.SoundFile(file)
        except soundfile.LibsndfileError as error:
            raise BadSampleError(Reason.FORMAT, f"no sound: {error.error_string}") from error
        with sound:
            low, high = SOUND_RATES_HZ
            if not low <= sound.samplerate <= high:
                raise BadSampleError(Reason.LIMIT, f"{sound.samplerate} Hz, sounds have from {low} to {high} Hz")
            yield sound


def check_frame(width: int, height: int) -> None:
    """Raise ``BadSampleError`` for frames of which a decoder cannot keep several."""
    BUDGET.ask(FRAME_PIXEL_BYTES * width * height, f"frames of {width}x{height} pixels", over_budget)


@contextmanager
def opened_video(medium: Content, limits: Limits) -> Iterator[Any]:
    """Open a video in FFmpeg's container; ``BadSampleError`` for a container that is not known."""
    with opened(medium, limits, whole=False) as file:
        start = file.read(_HEAD_BYTES)
        container = next((name for name, head in _CONTAINERS.items() if head.match(start)), None)
        if container is None:
            raise BadSampleError(Reason.FORMAT, "no MP4, QuickTime, Matroska, WebM or AVI")
        file.seek(0)
        with library("av").open(file, format=container, options=_VIDEO_OPTIONS) as video:
            # A frame larger than the header says would be made before it can be looked at.
            most = str(BUDGET.num_bytes // FRAME_PIXEL_BYTES)
            video.streams.video[0].codec_context.options = {"max_pixels": most}
            yield video


@contextmanager
def opened(medium: Content, limits: Limits, whole: bool = True) -> Iterator[IO[bytes]]:
    """Open a medium's bytes as a file; of at most ``limits.file_bytes`` if its reader may read it ``whole``."""
    with ExitStack() as stack:
        try:
            if isinstance(medium, Section):
                archive = stack.enter_context(tarfile.open(medium.path, "r:"))
                member = tarfile.TarInfo()
                member.offset_data = medium.offset
                member.size = medium.size
                file: IO[bytes] = archive.extractfile(member)  # type: ignore[assignment]
            else:
                file = io.BytesIO(medium) if isinstance(medium, bytes) else medium.open("rb")
                stack.enter_context(file)
        except OSError as error:
            raise BadSampleError(Reason.MISSING, f"{Path(error.filename).name}: {error.strerror}") from error
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if whole or isinstance(medium, bytes):
            limits.check("file_bytes", size, f"{size} bytes")
        yield file


def library(name: str) -> Any:
    """Import a module of the extra ``data``; ``UserError`` if it is not installed."""
    try:
        return __import__(name)
    except ImportError as error:
        raise UserError(f"{name}: not installed. Run pip install -e '.[data]'") from error
