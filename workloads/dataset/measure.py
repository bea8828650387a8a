"""From a raw sample to the sizes that stand in a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .interface import BadSampleError, Limits, RawSample, Reason
from .media import audio_seconds, image_size, video_header


@dataclass(frozen=True, slots=True)
class Sizes:
    """A row of a trace, but for its tokens: sides in pixels, seconds, and the texts that tokens are counted of.

    The last sides are those of a video's frames, 0 if unknown. Seconds are None without audio or video.
    """

    text_chars: int
    widths: Sequence[int]
    heights: Sequence[int]
    audio_seconds: float | None
    video_seconds: float | None
    texts: Sequence[str]

    @property
    def num_images(self) -> int:
        """Images, the video's frames not counted."""
        return len(self.widths) - (self.video_seconds is not None)


def measure(sample: RawSample, limits: Limits) -> Sizes:
    """The sizes of a sample, by the headers of its media; ``BadSampleError`` if it cannot be in a trace."""
    chars = sum(map(len, sample.texts))
    if chars > limits.text_chars:
        raise BadSampleError(Reason.LIMIT, f"{chars} characters, limits.text_chars={limits.text_chars}")
    if len(sample.images) > limits.media:
        raise BadSampleError(Reason.LIMIT, f"{len(sample.images)} images, limits.media={limits.media}")
    sizes = [image_size(image, limits) for image in sample.images]
    seconds = None if sample.audio is None else audio_seconds(sample.audio, limits)
    video = None if sample.video is None else video_header(sample.video, limits)
    if video is not None:
        sizes.append((video.width, video.height))
    if not (chars or sizes or seconds):
        raise BadSampleError(Reason.EMPTY)
    widths = [width for width, _ in sizes]
    heights = [height for _, height in sizes]
    return Sizes(chars, widths, heights, seconds, None if video is None else video.seconds, sample.texts)
