"""Images, sounds and videos by Pillow, libsndfile (soundfile) and FFmpeg (PyAV): sizes by headers, and content.

Each library is held to a list of formats, because some formats run programs or open other files.
"""

import io
import logging
import math
import os
import re
import tarfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from entrain_bench.base.errors import UserError
from entrain_bench.specs.tokens import TileRules
from entrain_bench.specs.workload import SOUND_HZ, Pixels, Sound

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
# Data often round the length that they state for a sound.
STATED_WITHIN_S = 0.1
# Bytes of a pixel while an image is decoded, turned and made RGB; and of a frame of a sound while it is resampled.
_PIXEL_BYTES = 12
_FRAME_BYTES = 24
# SigLIP's mean color, around images that are not square.
_SIGLIP_MEAN = [0.5, 0.5, 0.5]
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


def decoded_image(medium: Medium, limits: Limits) -> Image.Image:
    """Decode an image to RGB, as shown; ``BadSampleError`` if damaged, too large or unlike its header."""
    content = content_of(medium)
    known = header("images", content, limits)
    stated = f"{known.width}x{known.height} pixels"
    BUDGET.ask(_PIXEL_BYTES * known.width * known.height, stated, over_budget)
    with failing_as(Reason.DECODE), opened_image(content, limits) as image:
        image.load()
        shown = ImageOps.exif_transpose(image).convert("RGB")
    if shown.size != (known.width, known.height):
        wide, high = shown.size
        raise BadSampleError(Reason.CHANGED, f"its header says {stated}, it has {wide}x{high}")
    return shown


def resized(image: Image.Image, height: int, width: int) -> Pixels:
    """Scale an image by bicubic interpolation ``[height, width, 3]``, as the processors of published models do."""
    return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))


def image_tiles(image: Image.Image, alone: bool, rules: TileRules) -> list[Pixels]:
    """Cut an RGB image into tiles ``[pixels, pixels, 3]``, in the order of the published processors.

    LLaVA-OneVision (arXiv:2408.03326, section 3): the only image of a sample (``alone``) gives a thumbnail, then the
    tiles of its grid, padded with black; one of several images is padded to a square. InternVL (arXiv:2404.16821,
    section 3.2): the image is stretched to its grid, and several tiles are followed by a thumbnail.
    """
    transformers = library("transformers")
    side = rules.pixels
    options = {"size": {"height": side, "width": side}, "do_rescale": False, "do_normalize": False}
    if rules.dynamic_tiles is not None:
        cut = transformers.GotOcr2ImageProcessorPil(
            min_patches=1, max_patches=rules.dynamic_tiles, crop_to_patches=True, **options
        )
        values = cut([image], return_tensors="np")["pixel_values"]
    else:
        sides = range(side, side * rules.max_grid + 1, side)
        grids = [[height, width] for height in sides for width in sides]
        cut = transformers.LlavaOnevisionImageProcessorPil(
            image_grid_pinpoints=grids, image_mean=_SIGLIP_MEAN, **options
        )
        images = [image] if alone else [[image, image]]
        values = cut(images, return_tensors="np")["pixel_values"][0 if alone else 1]
    return list(np.rint(values).astype(np.uint8).transpose(0, 2, 3, 1))


def decoded_sound(medium: Medium, limits: Limits, start_s: float, stop_s: float) -> Sound:
    """Decode a part of a sound: the mean of its channels at ``SOUND_HZ`` ``[samples]``, shorter at the sound's end.

    It is empty if the sound ends up to ``STATED_WITHIN_S`` before the part starts. Raises ``BadSampleError`` for a
    sound that cannot be decoded, ``UserError`` if soundfile is not installed.
    """
    with failing_as(Reason.DECODE), opened_sound(content_of(medium), limits) as sound:
        rate = int(sound.samplerate)
        first = round(start_s * rate)
        last = round(stop_s * rate)
        if 0 < sound.frames <= first <= sound.frames + STATED_WITHIN_S * rate:
            return np.zeros(0, np.float32)
        needed = (_FRAME_BYTES + 4 * sound.channels) * (last - first)
        BUDGET.ask(needed, f"{stop_s - start_s:g} s at {rate} Hz", over_budget)
        sound.seek(min(first, sound.frames))
        wave: Sound = sound.read(last - first, dtype="float32", always_2d=True).mean(axis=1)
        if not len(wave):
            raise BadSampleError(Reason.DECODE, f"ends before {start_s:g} s")
        if rate == SOUND_HZ:
            return wave
        # Slow to import.
        from scipy.signal import resample_poly

        return np.asarray(resample_poly(wave, *Fraction(SOUND_HZ, rate).as_integer_ratio()), np.float32)


def content_of(medium: Medium) -> Content:
    """Return a medium's content; ``BadSampleError`` if there is none."""
    if isinstance(medium, Known):
        raise BadSampleError(Reason.RECORD, "it states sizes and has no content")
    return medium


def decoded_frames(medium: Medium, limits: Limits, count: int, most: int, size: tuple[int, int]) -> Pixels:
    """Decode the first ``most`` of ``count`` frames of a video, scaled to height and width ``[most, *size, 3]``.

    They are shown in the middle of ``count`` equal parts of its length. ``BadSampleError`` if damaged or too large.
    """
    content = content_of(medium)
    height, width = size
    BUDGET.ask(6 * most * height * width, f"{most} frames of {width}x{height}", over_budget)
    seconds = header("video", content, limits).seconds
    times = ((np.arange(most) + 0.5) * seconds / count).tolist()
    with failing_as(Reason.DECODE):
        found = [resized(frame.to_image(), height, width) for frame in _frames(content, limits, times)]
    if len(found) < most:
        raise BadSampleError(Reason.DECODE, f"it ends before frame {len(found)}")
    return np.stack(found)


def _frames(content: Content, limits: Limits, times: Sequence[float]) -> Iterator[Any]:
    """Yield the frames that a video shows at rising times, in seconds from its first frame on."""
    start: float | None = None
    place = 0
    with opened_video(content, limits) as video:
        for frame, following in pairwise(chain(video.decode(video=0), [None])):
            check_frame(frame.width, frame.height)
            start = frame.time or 0.0 if start is None else start
            end = math.inf if following is None else (following.time or 0.0) - start
            while place < len(times) and times[place] < end:
                yield frame
                place += 1
            if place == len(times):
                return
