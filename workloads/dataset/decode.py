"""Pixels of images and waves of sounds, under the same limits and formats as their headers (``media``).

Pillow decodes images, libsndfile sounds; scipy resamples. Videos are decoded in ``video``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction

import numpy as np
from PIL import Image

from entrain_bench.specs.contents import SOUND_HZ, Pixels, Sound

from ..budget import BUDGET
from .interface import BadSampleError, Content, Known, Limits, Medium, Reason, over_budget
from .media import checked_rate, image_size, library, one_line, opened, opened_image, turn

# A length that the data states beside a sound is often rounded.
STATED_WITHIN_S = 0.1
# The largest step between samples that waves are stretched or compressed by. A filter has 20 taps for each, and
# numbers up to here come within 31 millionths of the ratio of any two rates: 1 ms in 30 s.
_LARGEST_STEP = 2**14
# What a pixel of an image takes while it is decoded, turned and made RGB; and a frame of a sound's part, resampled.
_PIXEL_BYTES = 12
_FRAME_BYTES = 24
# Frames of sound that are decoded at a time, of up to 1024 channels.
_BLOCK_FRAMES = 2**14


@contextmanager
def decoded_image(medium: Medium, limits: Limits) -> Iterator[Image.Image]:
    """An image in RGB, as it is shown; ``BadSampleError`` if damaged, too large or not as its header says."""
    content = content_of(medium)
    measured = image_size(content, limits)
    BUDGET.ask(_PIXEL_BYTES * measured[0] * measured[1], f"{measured[0]}x{measured[1]} pixels", over_budget)
    try:
        with opened_image(content, limits) as image:
            # TIFFs are turned as they are loaded.
            how = None if image.format == "TIFF" else turn(image)
            image.load()
            shown = (image if how is None else image.transpose(how)).convert("RGB")
    except BadSampleError:
        raise
    # What plugins raise on bytes that nobody wrote has no common base.
    except Exception as error:
        raise BadSampleError(Reason.DECODE, one_line(error)) from error
    if shown.size != measured:
        (width, height) = measured
        (wide, high) = shown.size
        raise BadSampleError(Reason.CHANGED, f"its header says {width}x{height} pixels, it has {wide}x{high}")
    yield shown


def resized(image: Image.Image, height: int, width: int) -> Pixels:
    """An image scaled by bicubic interpolation ``[height, width, 3]``, as the processors of published models do."""
    return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))


def decoded_sound(medium: Medium, limits: Limits, start_s: float, stop_s: float) -> Sound:
    """A part of a sound: its channels' mean, at ``SOUND_HZ`` ``[samples]``; shorter where the sound ends.

    It is empty where the sound ends up to ``STATED_WITHIN_S`` before the part begins.

    Raises:
        BadSampleError: for what cannot be decoded, and a rate beyond ``media.SOUND_RATES_HZ``.
        UserError: if soundfile is not installed.
    """
    soundfile = library("soundfile")
    with opened(content_of(medium), limits.file_bytes, whole=False) as file:
        try:
            with soundfile.SoundFile(file) as sound:
                rate = checked_rate(sound.samplerate)
                first = round(start_s * rate)
                last = round(stop_s * rate)
                if 0 < sound.frames <= first <= sound.frames + STATED_WITHIN_S * rate:
                    return np.zeros(0, np.float32)
                num_bytes = _FRAME_BYTES * (last - first) + 8 * _BLOCK_FRAMES * sound.channels
                BUDGET.ask(num_bytes, f"{stop_s - start_s:g} s at {rate} Hz", over_budget)
                sound.seek(min(first, sound.frames))
                blocks = sound.blocks(_BLOCK_FRAMES, frames=last - first, dtype="float32", always_2d=True)
                wave = np.concatenate([np.zeros(0, np.float32), *(block.mean(axis=1) for block in blocks)])
                if not len(wave):
                    raise BadSampleError(Reason.DECODE, f"ends before {start_s:g} s")
                return _resampled(wave, rate)
        except BadSampleError:
            raise
        except Exception as error:
            raise BadSampleError(Reason.DECODE, one_line(error)) from error


def steps_between(rate_hz: int) -> tuple[int, int]:
    """By what a wave is stretched and compressed to come from a rate to ``SOUND_HZ``.

    Exact where both numbers are at most 16384, as those of all usual rates are (of 44.1 kHz 160 and 441), and otherwise
    the nearest ratio of such numbers.
    """
    # The smaller over the larger, so that the bound is on the larger.
    ratio = Fraction(min(SOUND_HZ, rate_hz), max(SOUND_HZ, rate_hz)).limit_denominator(_LARGEST_STEP)
    small, large = ratio.as_integer_ratio()
    return (small, large) if rate_hz > SOUND_HZ else (large, small)


def content_of(medium: Medium) -> Content:
    """A medium's content; ``BadSampleError`` if there is none."""
    if isinstance(medium, Known):
        raise BadSampleError(Reason.RECORD, "it states sizes and has no content")
    return medium


def _resampled(wave: Sound, rate_hz: int) -> Sound:
    if rate_hz == SOUND_HZ:
        return wave
    # It takes longer to import than all else here.
    from scipy.signal import resample_poly

    return np.asarray(resample_poly(wave, *steps_between(rate_hz)), np.float32)
