"""Pixels of images and videos, and waves of sounds, under the same limits and formats as their headers (``media``)."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from math import ceil
from typing import Any

import numpy as np
from PIL import Image

from entrain_bench.base.arrays import IntArray
from entrain_bench.specs.tokens import TileRules
from entrain_bench.specs.workload import SOUND_HZ, Pixels, Sound

from ..budget import BUDGET
from ..tiles import best_grids, nearest_grids
from .interface import BadSampleError, Content, Known, Limits, Medium, Reason, over_budget
from .media import check_frame, failing_as, image_size, opened_image, opened_sound, opened_video, turn, video_header

# Data often round the length that they state for a sound.
STATED_WITHIN_S = 0.1
# The largest step between samples by which waves are stretched or compressed. A filter has 20 taps per step, and
# numbers up to here come within 31 millionths of the ratio of any two rates: 1 ms in 30 s.
_LARGEST_STEP = 2**14
# Bytes of a pixel while an image is decoded, turned and made RGB; and of a frame of a sound while it is resampled.
_PIXEL_BYTES = 12
_FRAME_BYTES = 24
# Frames of sound that are decoded at a time, of up to 1024 channels.
_BLOCK_FRAMES = 2**14
# SigLIP's mean color, around images that are not square.
_GREY = (127, 127, 127)


def decoded_image(medium: Medium, limits: Limits) -> Image.Image:
    """Decode an image to RGB, as shown; ``BadSampleError`` if damaged, too large or unlike its header."""
    content = content_of(medium)
    width, height = image_size(content, limits)
    BUDGET.ask(_PIXEL_BYTES * width * height, f"{width}x{height} pixels", over_budget)
    with failing_as(Reason.DECODE), opened_image(content, limits) as image:
        # Pillow turns TIFFs as it loads them.
        how = None if image.format == "TIFF" else turn(image)
        image.load()
        shown = (image if how is None else image.transpose(how)).convert("RGB")
    if shown.size != (width, height):
        wide, high = shown.size
        raise BadSampleError(Reason.CHANGED, f"its header says {width}x{height} pixels, it has {wide}x{high}")
    return shown


def resized(image: Image.Image, height: int, width: int) -> Pixels:
    """Scale an image by bicubic interpolation ``[height, width, 3]``, as the processors of published models do."""
    return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))


def tile_of(number: int, widths: IntArray, heights: IntArray, rules: TileRules) -> tuple[int, int]:
    """Return the image and the number within it of one of a sample's tiles; sides are in pixels ``[images]``."""
    if rules.dynamic_tiles is None:
        return (0, number) if len(widths) == 1 else (number, 0)
    columns, rows = nearest_grids(widths, heights, rules)
    tiles = columns * rows
    ends = np.cumsum(tiles + (tiles > 1))
    image = int(np.searchsorted(ends, number, side="right"))
    return image, number - (int(ends[image - 1]) if image else 0)


def image_tiles(image: Image.Image, alone: bool, rules: TileRules) -> list[Pixels]:
    """Cut an RGB image into tiles ``[pixels, pixels, 3]``, in the order of the published processors.

    LLaVA-OneVision (arXiv:2408.03326, section 3): the only image of a sample (``alone``) gives a thumbnail, then the
    tiles of its grid, padded with black; one of several images is padded to a square. InternVL (arXiv:2404.16821,
    section 3.2): the image is stretched to its grid, and several tiles are followed by a thumbnail.
    """
    side = rules.pixels
    sizes = np.array([image.width]), np.array([image.height])
    thumbnail = resized(image, side, side)
    if rules.dynamic_tiles is not None:
        columns, rows = (int(count[0]) for count in nearest_grids(*sizes, rules))
        tiles = _cut(resized(image, rows * side, columns * side), side)
        return tiles if len(tiles) == 1 else [*tiles, thumbnail]
    if not alone:
        longer = max(image.size)
        canvas = Image.new("RGB", (longer, longer), _GREY)
        canvas.paste(image, ((longer - image.width) // 2, (longer - image.height) // 2))
        return [resized(canvas, side, side)]
    columns, rows = (int(count[0]) for count in best_grids(*sizes, rules))
    return [thumbnail, *_cut(_fitted(image, rows * side, columns * side), side)]


def _cut(pixels: Pixels, side: int) -> list[Pixels]:
    height, width, _ = pixels.shape
    return [
        pixels[row : row + side, column : column + side]
        for row in range(0, height, side)
        for column in range(0, width, side)
    ]


def _fitted(image: Image.Image, height: int, width: int) -> Pixels:
    """Scale an image to fit, in the middle of black."""
    if width * image.height < height * image.width:
        high = min(height, ceil(image.height * (width / image.width)))
        wide = width
    else:
        high = height
        wide = min(width, ceil(image.width * (height / image.height)))
    canvas = np.zeros((height, width, 3), np.uint8)
    top = (height - high) // 2
    left = (width - wide) // 2
    canvas[top : top + high, left : left + wide] = resized(image, high, wide)
    return canvas


def decoded_sound(medium: Medium, limits: Limits, start_s: float, stop_s: float) -> Sound:
    """Decode a part of a sound: the mean of its channels at ``SOUND_HZ`` ``[samples]``, shorter at the sound's end.

    It is empty if the sound ends up to ``STATED_WITHIN_S`` before the part starts. Raises ``BadSampleError`` for a
    sound that cannot be decoded, ``UserError`` if soundfile is not installed.
    """
    with opened_sound(content_of(medium), limits, Reason.DECODE) as sound:
        rate = int(sound.samplerate)
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


def _resampled(wave: Sound, rate_hz: int) -> Sound:
    if rate_hz == SOUND_HZ:
        return wave
    # Slow to import.
    from scipy.signal import resample_poly

    return np.asarray(resample_poly(wave, *steps_between(rate_hz)), np.float32)


def steps_between(rate_hz: int) -> tuple[int, int]:
    """Return by what a wave is stretched and compressed to get from a rate to ``SOUND_HZ``.

    Exact if both numbers are at most 16384, as for all usual rates; otherwise the nearest ratio of such numbers.
    """
    # The bound is on the larger number.
    ratio = Fraction(min(SOUND_HZ, rate_hz), max(SOUND_HZ, rate_hz)).limit_denominator(_LARGEST_STEP)
    small, large = ratio.as_integer_ratio()
    return (small, large) if rate_hz > SOUND_HZ else (large, small)


def content_of(medium: Medium) -> Content:
    """Return a medium's content; ``BadSampleError`` if there is none."""
    if isinstance(medium, Known):
        raise BadSampleError(Reason.RECORD, "it states sizes and has no content")
    return medium


class VideoFrames:
    """``count`` scaled frames of a video, shown in the middle of as many equal parts of its length.

    Frames are decoded when they are asked for, and kept. Raises ``BadSampleError`` for an unreadable header and limits.
    """

    def __init__(self, medium: Medium, limits: Limits, count: int, height: int, width: int) -> None:
        self._content = content_of(medium)
        self._limits = limits
        self._size = (height, width)
        seconds = video_header(self._content, limits).seconds
        self._times: list[float] = ((np.arange(count) + 0.5) * seconds / count).tolist()
        self._kept = list[Pixels]()
        self._rest = self._frames()

    def between(self, first: int, stop: int) -> Pixels:
        """Return frames from one number up to another ``[frames, height, width, 3]``; ``BadSampleError`` if damaged."""
        height, width = self._size
        BUDGET.ask(6 * stop * height * width, f"{stop} frames of {width}x{height}", over_budget)
        with failing_as(Reason.DECODE):
            while len(self._kept) < stop:
                frame = next(self._rest, None)
                if frame is None:
                    raise BadSampleError(Reason.DECODE, f"it ends before frame {len(self._kept)} of {len(self._times)}")
                self._kept.append(resized(frame.to_image(), height, width))
        return np.stack(self._kept[first:stop])

    def _frames(self) -> Iterator[Any]:
        """Yield the frames that the video shows at the times, in seconds from its first frame on."""
        wanted = iter(self._times)
        time = next(wanted, None)
        before = None
        start = 0.0
        with opened_video(self._content, self._limits) as video:
            for frame in video.decode(video=0):
                check_frame(frame.width, frame.height)
                if before is None:
                    start = frame.time or 0.0
                while time is not None and before is not None and time < (frame.time or 0.0) - start:
                    yield before
                    time = next(wanted, None)
                if time is None:
                    return
                before = frame
            while time is not None and before is not None:
                yield before
                time = next(wanted, None)
