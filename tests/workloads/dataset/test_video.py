"""Frames of a video are the same in whatever order they are asked for, and no more are decoded than that takes."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from entrain_bench_workloads.dataset import video as video_module
from entrain_bench_workloads.dataset.interface import BadSampleError, Known, Limits, Reason
from entrain_bench_workloads.dataset.media import video_header
from entrain_bench_workloads.dataset.video import VideoFrames
from support.datasets import video_bytes

LIMITS = Limits()
CONTENT = video_bytes(64, 48, 40, shades=True)
FRAME_BYTES = 3 * 14 * 28


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each frame that is decoded."""
    seen, check = list[int](), video_module.check_frame

    def noting(width: int, height: int) -> None:
        seen.append(width)
        check(width, height)

    monkeypatch.setattr(video_module, "check_frame", noting)
    return seen


def reference(count: int) -> np.ndarray:
    """All frames: 4 s at 10 frames a second, each shown until the next."""
    with av.open(io.BytesIO(CONTENT)) as video:
        frames = [frame.to_image() for frame in video.decode(video=0)]
    places = [int((number + 0.5) * 4.0 / count * 10) for number in range(count)]
    return np.stack([np.asarray(frames[place].resize((28, 14), Image.Resampling.BICUBIC)) for place in places])


@settings(deadline=None, max_examples=30)
@given(groups=st.lists(st.integers(0, 15), min_size=1, max_size=8), kept=st.integers(1, 40))
def test_frames_are_the_same_in_any_order(groups: list[int], kept: int) -> None:
    expected = reference(32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(video_module, "_KEPT_BYTES", kept * FRAME_BYTES)
        frames = VideoFrames(CONTENT, LIMITS, 32, 14, 28)
        for group in groups:
            np.testing.assert_array_equal(frames.between(2 * group, 2 * group + 2), expected[2 * group : 2 * group + 2])
            assert len(frames._kept) <= max(2, kept)


def test_a_short_part_is_decoded_and_no_more(decoded: list[int]) -> None:
    frames = VideoFrames(CONTENT, LIMITS, 8, 14, 28)
    frames.between(0, 2)
    # The second is shown from frame 7 on, until frame 8 comes.
    assert len(decoded) == 9
    frames.between(0, 2)
    assert len(decoded) == 9
    frames.between(2, 4)
    assert len(decoded) == 19


def test_videos_in_turns_are_decoded_once(decoded: list[int]) -> None:
    videos = [VideoFrames(CONTENT, LIMITS, 8, 14, 28) for _ in range(2)]
    for first in range(0, 8, 2):
        for frames in videos:
            frames.between(first, first + 2)
    # The last is shown at 3.75 s: frame 37, until frame 38 comes.
    assert len(decoded) == 2 * 39


def test_what_is_no_longer_kept_is_decoded_again(decoded: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_module, "_KEPT_BYTES", 4 * FRAME_BYTES)
    frames = VideoFrames(CONTENT, LIMITS, 8, 14, 28)
    last = frames.between(6, 8)
    assert len(decoded) == 39
    frames.between(4, 6)
    assert len(decoded) == 39
    frames.between(2, 4)
    assert len(decoded) == 39 + 19
    np.testing.assert_array_equal(frames.between(6, 8), last)


def test_a_video_without_a_frame_says_so_each_time() -> None:
    whole = video_bytes(64, 48, 40, kind="avi")
    frames = VideoFrames(whole[: whole.index(b"movi") + 4], LIMITS, 8, 14, 28)
    for _ in range(2):
        with pytest.raises(BadSampleError) as error:
            frames.between(0, 2)
        assert error.value.reason is Reason.DECODE


def test_frames_that_a_decoder_cannot_keep_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert video_header(Known(8192, 4320, 1.0), LIMITS).width == 8192
    with pytest.raises(
        BadSampleError,
        match=r"frames of 8192x8192 pixels would take 3.8 GiB of memory, at most 2 ",
    ) as error:
        video_header(Known(8192, 8192, 1.0), LIMITS)
    assert error.value.reason is Reason.LIMIT
    frames = VideoFrames(CONTENT, LIMITS, 8, 14, 28)
    # FFmpeg itself refuses frames that are larger than the header said.
    monkeypatch.setattr("entrain_bench_workloads.dataset.media.FRAME_PIXEL_BYTES", 2**20)
    with pytest.raises(BadSampleError, match="cannot be decoded"):
        frames.between(0, 1)
