"""Pixels and waves of media, under the same limits and formats as their headers (``media``).

Pillow decodes images, libsndfile sounds, FFmpeg videos; scipy resamples.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from math import gcd
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from entrain_bench.specs.contents import SOUND_HZ, Pixels, Sound

from .interface import BadSampleError, Content, Known, Limits, Medium, Reason
from .media import (
    HEAD_BYTES,
    IMAGE_FORMATS,
    VIDEO_OPTIONS,
    container_format,
    image_size,
    library,
    no_limit_of_its_own,
    one_line,
    opened,
    video_header,
)


@contextmanager
def decoded_image(medium: Medium, limits: Limits) -> Iterator[Image.Image]:
    """An image in RGB, turned as it is shown (EXIF orientation).

    Raises:
        BadSampleError: for what cannot be decoded to its end, is of no known format, or is beyond a limit.
    """
    content = _content(medium)
    image_size(content, limits)
    with opened(content, limits.file_bytes) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with no_limit_of_its_own(), Image.open(file, formats=IMAGE_FORMATS) as image:
                image.load()
                shown = ImageOps.exif_transpose(image).convert("RGB")
        # What plugins raise on bytes that nobody wrote has no common base.
        except Exception as error:
            raise BadSampleError(Reason.DECODE, one_line(error)) from error
    yield shown


def resized(image: Image.Image, height: int, width: int) -> Pixels:
    """An image scaled by bicubic interpolation ``[height, width, 3]``, as the processors of published models do."""
    return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))


def decoded_sound(medium: Medium, limits: Limits, start_s: float, stop_s: float) -> Sound:
    """A part of a sound: its channels' mean, at ``SOUND_HZ`` ``[samples]``; shorter where the sound ends.

    Args:
        medium: the sound.
        limits: of what is read.
        start_s: where the part begins.
        stop_s: where it ends.

    Raises:
        BadSampleError: for what cannot be decoded.
        UserError: if soundfile is not installed.
    """
    soundfile = library("soundfile")
    with opened(_content(medium), limits.file_bytes, whole=False) as file:
        try:
            with soundfile.SoundFile(file) as sound:
                rate = int(sound.samplerate)
                first, last = round(start_s * rate), round(stop_s * rate)
                sound.seek(min(first, sound.frames))
                wave = sound.read(last - first, dtype="float32", always_2d=True).mean(axis=1)
        except Exception as error:
            raise BadSampleError(Reason.DECODE, one_line(error)) from error
    if not len(wave):
        raise BadSampleError(Reason.DECODE, f"ends before {start_s:g} s")
    return _resampled(wave, rate)


def _resampled(wave: Sound, rate: int) -> Sound:
    if rate == SOUND_HZ:
        return wave
    # It takes longer to import than all else here.
    from scipy.signal import resample_poly

    common = gcd(rate, SOUND_HZ)
    return np.asarray(resample_poly(wave, SOUND_HZ // common, rate // common), np.float32)


def decoded_frames(medium: Medium, limits: Limits, count: int, height: int, width: int) -> list[Pixels]:
    """Frames of a video, evenly spread over its length: those shown in the middle of ``count`` equal parts.

    Args:
        medium: the video.
        limits: of what is read.
        count: how many.
        height: of each, in pixels.
        width: of each, in pixels.

    Raises:
        BadSampleError: for what cannot be decoded.
        UserError: if PyAV is not installed.
    """
    av, content = library("av"), _content(medium)
    seconds = video_header(content, limits).seconds
    times = (np.arange(count) + 0.5) * seconds / count
    with opened(content, limits.file_bytes, whole=False) as file:
        container = container_format(file.read(HEAD_BYTES))
        file.seek(0)
        try:
            with av.open(file, format=container, options=VIDEO_OPTIONS) as video:
                shown = _shown_at(video, times.tolist())
                return [resized(frame.to_image(), height, width) for frame in shown]
        except Exception as error:
            raise BadSampleError(Reason.DECODE, one_line(error)) from error


def _shown_at(video: Any, times: list[float]) -> Iterator[Any]:
    """The frames that a video shows at rising times, in seconds from its first frame on."""
    wanted, before, start = iter(times), None, 0.0
    time = next(wanted, None)
    for frame in video.decode(video=0):
        if before is None:
            start = frame.time or 0.0
        while time is not None and before is not None and time < (frame.time or 0.0) - start:
            yield before
            time = next(wanted, None)
        if time is None:
            return
        before = frame
    if before is None:
        raise ValueError("no frame")
    while time is not None:
        yield before
        time = next(wanted, None)


def _content(medium: Medium) -> Content:
    if isinstance(medium, Known):
        raise BadSampleError(Reason.RECORD, "it states sizes and has no content")
    return medium
