"""Pixels to patches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from entrain_bench.base.errors import IncompatibleError
from entrain_bench.specs.contents import Pixels

CHANNELS = 3
# Means and standard deviations of colours from 0 to 1: those of CLIP's data (arXiv:2103.00020), which Qwen2.5-VL's
# preprocessor_config.json has, and halves, by which SigLIP's processor makes colours from -1 to 1.
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALVES = ((0.5,) * CHANNELS, (0.5,) * CHANNELS)


@dataclass(frozen=True, slots=True)
class PatchRules:
    """How an encoder takes pixels.

    Attributes:
        pixels: side of a patch.
        frames: frames of a patch; an image is repeated as often.
        merged: side of the square of patches that follow one another.
        mean, std: of each colour, from 0 to 1.
    """

    pixels: int
    frames: int
    merged: int
    mean: tuple[float, ...]
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
    """Write the patches of a picture.

    Squares of ``merged`` x ``merged`` patches follow one another row by row, and within them their patches row by row.
    A patch is ordered by colour, frame and row (Hugging Face's ``Qwen2VLImageProcessor``; with one frame and nothing
    merged the input of SigLIP's first convolution).

    ``pixels`` are ``[frames, height, width, 3]``; a single frame is repeated, and sides are whole squares. ``out`` is
    ``[patches, 3 * frames * side^2]``.
    """
    side = rules.pixels
    merged = rules.merged
    given, height, width, _ = pixels.shape
    squares = (height // (side * merged), merged, side, width // (side * merged), merged, side)
    # From frame, square's row, patch's row, row, and the same of columns, colour; in order while it is a byte each.
    bytes_of = np.ascontiguousarray(pixels.reshape(given, *squares, CHANNELS).transpose(1, 4, 2, 5, 7, 0, 3, 6))
    std = np.array(rules.std)
    scale, shift = (
        each.astype(np.float32)[:, None, None, None] for each in (1.0 / (255.0 * std), np.array(rules.mean) / std)
    )
    patches = out.reshape(squares[0], squares[3], merged, merged, CHANNELS, rules.frames, side, side)
    own = patches[..., :given, :, :]
    np.multiply(bytes_of, scale, out=own)
    own -= shift
    patches[..., given:, :, :] = patches[..., :1, :, :]
