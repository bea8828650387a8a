"""Pixels to patches and waves to log-mel windows, as the processors of published models make them; without torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrain_bench.base.errors import IncompatibleError
from entrain_bench.specs.workload import SOUND_HZ, Pixels, Sound

CHANNELS = 3
# Means and standard deviations of colors from 0 to 1: those of CLIP's data (arXiv:2103.00020), which Qwen2.5-VL's
# preprocessor_config.json has, and halves, by which SigLIP's processor makes colors from -1 to 1.
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALVES = ((0.5,) * CHANNELS, (0.5,) * CHANNELS)
# Samples between log-mel frames.
HOP = 160
# Frames that the first convolution takes, and those of a token, for the second has a stride.
KERNEL = 3
FRAMES_OF_TOKEN = 2
# Frames that Whisper takes at a time, 30 s.
_LONGEST_FRAMES = 3000


@dataclass(frozen=True, slots=True)
class PatchRules:
    """How an encoder takes pixels."""

    pixels: int  # side of a patch
    frames: int  # frames of a patch; an image is repeated as often
    merged: int  # side of the square of consecutive patches
    mean: tuple[float, ...]  # of each color, from 0 to 1
    std: tuple[float, ...]

    @classmethod
    def of(cls, width: int, pixels: int, merged: int, checkpoint: str | None, where: str) -> PatchRules:
        """The rules of an encoder; ``IncompatibleError`` for a width that is not one of whole patches."""
        frames, rest = divmod(width, CHANNELS * pixels**2)
        if rest or not frames:
            raise IncompatibleError(
                f"{where}: takes {width} features per token; must be a multiple of {CHANNELS} colors x {pixels} x "
                f"{pixels} pixels of a patch (model.tokens.patch_pixels)"
            )
        mean, std = CLIP if checkpoint == "qwen25vl_vision" else HALVES
        return cls(pixels, frames, merged, mean, std)


def write_patches(pixels: Pixels, rules: PatchRules, out: NDArray[np.float32]) -> None:
    """Write the patches of a picture, square by square of ``merged`` x ``merged``, each by color, frame and row.

    As Hugging Face's ``Qwen2VLImageProcessor``, or SigLIP's convolution. ``pixels`` are ``[frames, height, width, 3]``,
    a single frame is repeated; ``out`` is ``[patches, 3 * frames * side^2]``.
    """
    side = rules.pixels
    merged = rules.merged
    given, height, width, _ = pixels.shape
    squares = (height // (side * merged), merged, side, width // (side * merged), merged, side)
    # From frame, square's row, patch's row, row, and the same of columns, color; sorted while each is one byte.
    bytes_of = np.ascontiguousarray(pixels.reshape(given, *squares, CHANNELS).transpose(1, 4, 2, 5, 7, 0, 3, 6))
    std = np.array(rules.std)
    scale, shift = (
        values.astype(np.float32)[:, None, None, None] for values in (1.0 / (255.0 * std), np.array(rules.mean) / std)
    )
    patches = out.reshape(squares[0], squares[3], merged, merged, CHANNELS, rules.frames, side, side)
    given_frames = patches[..., :given, :, :]
    np.multiply(bytes_of, scale, out=given_frames)
    given_frames -= shift
    patches[..., given:, :, :] = patches[..., :1, :, :]


def write_windows(wave: Sound, out: NDArray[np.float32]) -> None:
    """Write windows of log-mel frames of a sound at ``SOUND_HZ`` ``[samples]``.

    ``out`` is ``[tokens, frames of a token * 3 * mels]``: frames before, at and after each; zeros beyond the ends.
    """
    tokens, width = out.shape
    mels = width // (FRAMES_OF_TOKEN * KERNEL)
    count = FRAMES_OF_TOKEN * tokens
    padded = np.pad(log_mel(wave, count, mels), ((1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, KERNEL, axis=0)
    out.reshape(count, KERNEL, mels)[:] = windows.transpose(0, 2, 1)


def log_mel(wave: Sound, num_frames: int, mels: int) -> NDArray[np.float32]:
    """Log-mel frames every 10 ms ``[num_frames, mels]``, padded or cut, by ``WhisperFeatureExtractor``."""
    longest = HOP * max(num_frames, _LONGEST_FRAMES)
    given = wave[: HOP * num_frames]
    extracted = _extractor(mels)(given, sampling_rate=SOUND_HZ, max_length=longest, return_tensors="np")
    frames: NDArray[np.float32] = extracted["input_features"][0].T[:num_frames]
    return frames


@cache
def _extractor(mels: int) -> Any:
    # Imported where needed: it takes seconds, and is installed for audio only.
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=mels)  # type: ignore[no-untyped-call]
