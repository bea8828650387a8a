"""Frames of videos, decoded by FFmpeg as far as they are asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from entrain_bench.specs.contents import Pixels

from ..budget import BUDGET
from .decode import content_of, resized
from .interface import BadSampleError, Limits, Medium, Reason, over_budget
from .media import check_frame, one_line, opened_video, video_header

# Scaled frames of a video that are kept for who asks for them again.
_KEPT_BYTES = 32 * 2**20


class VideoFrames:
    """``count`` frames of a video, scaled: those shown in the middle of as many equal parts of its length.

    Who asks for frames further on has the video decoded from where it is; who asks for what is no longer kept, from its
    beginning. Raises ``BadSampleError`` for a header that cannot be read, or is beyond a limit.
    """

    def __init__(self, medium: Medium, limits: Limits, count: int, height: int, width: int) -> None:
        self._content = content_of(medium)
        self._limits = limits
        self._size = (height, width)
        seconds = video_header(self._content, limits).seconds
        self._times: list[float] = ((np.arange(count) + 0.5) * seconds / count).tolist()
        self._most = max(1, _KEPT_BYTES // (3 * height * width))
        self._shown: Iterator[Any] | None = None
        self._kept = deque[Pixels]()
        # Of the frame behind the last that is kept.
        self._next = 0

    def between(self, first: int, stop: int) -> Pixels:
        """Frames from one number up to another ``[frames, height, width, 3]``; ``BadSampleError`` if damaged."""
        assert 0 <= first < stop <= len(self._times)
        height, width = self._size
        BUDGET.ask(6 * (stop - first) * height * width, f"{stop - first} frames of {width}x{height}", over_budget)
        try:
            self._decode(first, stop)
        except BadSampleError:
            self._shown = None
            raise
        except Exception as error:
            self._shown = None
            raise BadSampleError(Reason.DECODE, one_line(error)) from error
        start = self._next - len(self._kept)
        return np.stack([self._kept[number - start] for number in range(first, stop)])

    def _decode(self, first: int, stop: int) -> None:
        """Go on, or begin anew, until all of these frames are kept, and of those before what fits beside them."""
        if self._shown is None or first < self._next - len(self._kept):
            self._shown = self._frames()
            self._next = 0
            self._kept.clear()
        most = max(self._most, stop - first)
        while self._next < stop:
            frame = next(self._shown)
            if self._next >= stop - most:
                self._kept.append(resized(frame.to_image(), *self._size))
            if len(self._kept) > most:
                self._kept.popleft()
            self._next += 1

    def _frames(self) -> Iterator[Any]:
        """The frames that are shown at the times, as they come."""
        with opened_video(self._content, self._limits) as video:
            yield from _shown_at(video, self._times)


def _shown_at(video: Any, times: list[float]) -> Iterator[Any]:
    """The frames that a video shows at rising times, in seconds from its first frame on."""
    wanted = iter(times)
    before = None
    start = 0.0
    time = next(wanted, None)
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
    if before is None:
        raise ValueError("no frame")
    while time is not None:
        yield before
        time = next(wanted, None)
