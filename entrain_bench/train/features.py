"""Pixels to patches and waves to log-mel windows, as the processors of published models make them; without torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from entrain_bench.base.errors import IncompatibleError
from entrain_bench.specs.workload import SOUND_HZ, Pixels, Sound

CHANNELS = 3
# Means and standard deviations of colours from 0 to 1: those of CLIP's data (arXiv:2103.00020), which Qwen2.5-VL's
# preprocessor_config.json has, and halves, by which SigLIP's processor makes colours from -1 to 1.
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALVES = ((0.5,) * CHANNELS, (0.5,) * CHANNELS)
WINDOW = 400
HOP = 160
# Frames that the first convolution takes, and those of a token, for the second has a stride.
KERNEL = 3
FRAMES_OF_TOKEN = 2
# Frames that Whisper takes at a time, 30 s.
_LONGEST_FRAMES = 3000
# Orders of magnitude below the loudest that are still told apart, and power that counts as none.
_RANGE = 8.0
_LEAST_POWER = 1e-10
# Slaney's scale (Auditory Toolbox, 1998): linear up to 1 kHz, 15 steps; then 27 steps for every factor of 6.4.
_STEP_HZ = 200.0 / 3
_KNEE_HZ = 1000.0
_KNEE_MELS = 15.0
_STEPS_OF_FACTOR = 27.0
_FACTOR = 6.4
_HIGHEST_HZ = 8000.0
_HANN = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)


@dataclass(frozen=True, slots=True)
class PatchRules:
    """How an encoder takes pixels."""

    pixels: int  # side of a patch
    frames: int  # frames of a patch; an image is repeated as often
    merged: int  # side of the square of consecutive patches
    mean: tuple[float, ...]  # of each colour, from 0 to 1
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
    """Write the patches of a picture, square by square of ``merged`` x ``merged``, each by colour, frame and row.

    As Hugging Face's ``Qwen2VLImageProcessor``, or SigLIP's convolution. ``pixels`` are ``[frames, height, width, 3]``,
    a single frame is repeated; ``out`` is ``[patches, 3 * frames * side^2]``.
    """
    side = rules.pixels
    merged = rules.merged
    given, height, width, _ = pixels.shape
    squares = (height // (side * merged), merged, side, width // (side * merged), merged, side)
    # From frame, square's row, patch's row, row, and the same of columns, colour; in order while it is a byte each.
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
    frames = log_mel(wave, count, mels)
    padded = np.concatenate([np.zeros((1, mels), np.float32), frames, np.zeros((1, mels), np.float32)])
    windows = out.reshape(count, KERNEL, mels)
    for place in range(KERNEL):
        windows[:, place] = padded[place : place + count]


def log_mel(wave: Sound, num_frames: int, mels: int) -> NDArray[np.float32]:
    """Log-mel frames every 10 ms ``[num_frames, mels]``, padded or cut, as of ``WhisperFeatureExtractor``."""
    filled = np.zeros(num_frames * HOP, np.float32)
    filled[: len(wave)] = wave[: len(filled)]
    # Both ends of what is filled up are mirrored; of the silence in between as much is heard as has a sound in it.
    behind = np.zeros(WINDOW, np.float32) if num_frames < _LONGEST_FRAMES else _mirrored(filled[::-1])[::-1]
    padded = np.concatenate([_mirrored(filled), filled, behind])
    heard = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP]
    spectrum = np.fft.rfft(heard * _HANN, axis=1)
    power = (spectrum.real**2 + spectrum.imag**2) @ mel_filters(mels)
    loudness: NDArray[np.float64] = np.log10(np.maximum(power, _LEAST_POWER))
    loudest = loudness[: max(num_frames, _LONGEST_FRAMES)].max()
    return np.asarray((np.maximum(loudness[:num_frames], loudest - _RANGE) + 4.0) / 4.0, np.float32)


def _mirrored(wave: Sound) -> Sound:
    longer = np.zeros(WINDOW // 2 + 1, np.float32)
    longer[: len(wave)] = wave[: len(longer)]
    return longer[:0:-1]


@cache
def mel_filters(mels: int) -> NDArray[np.float64]:
    """Weights of frequencies in each band ``[WINDOW / 2 + 1, mels]``: triangles on Slaney's scale, all of one area."""
    frequencies = np.arange(WINDOW // 2 + 1) * SOUND_HZ / WINDOW
    highest = _KNEE_MELS + _STEPS_OF_FACTOR * np.log(_HIGHEST_HZ / _KNEE_HZ) / np.log(_FACTOR)
    places = np.linspace(0.0, float(highest), mels + 2)
    above = _KNEE_HZ * _FACTOR ** ((places - _KNEE_MELS) / _STEPS_OF_FACTOR)
    edges = np.where(places < _KNEE_MELS, places * _STEP_HZ, above)
    rising = (frequencies[:, None] - edges[:-2]) / np.diff(edges)[:-1]
    falling = (edges[2:] - frequencies[:, None]) / np.diff(edges)[1:]
    return np.asarray(np.maximum(0.0, np.minimum(rising, falling)) * 2.0 / (edges[2:] - edges[:-2]))
