"""Contents of samples beyond their shapes. Only training reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from entrain_bench.base.arrays import IntArray
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.specs.tokens import TokenRules

# Whisper's and its successors' (arXiv:2212.04356, section 2.2).
SOUND_HZ = 16_000

type Pixels = NDArray[np.uint8]
type Sound = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Moved:
    """Where data has moved: its path, the folder of its media, the tokenizer; None: the same as in the workload."""

    path: str | None = None
    root: str | None = None
    tokenizer: str | None = None


class Samples(Protocol):
    """Reads samples one by one, in any order; frozen and made of plain values, for it travels between processes.

    All methods raise ``UserError`` naming the sample where it cannot be read, or is not what its shapes say.
    """

    def picture(self, shapes: SampleShapes, item: int) -> Pixels:
        """An image, or the frames of a video's group, as large as item's patches ``[frames, height, width, 3]``."""

    def sound(self, shapes: SampleShapes, item: int) -> Sound:
        """A segment of a sound: one channel at ``SOUND_HZ``, from -1 to 1 ``[samples]``."""

    def tokens(self, shapes: SampleShapes, sample: int) -> IntArray:
        """Token ids of a sample's text ``[text tokens]``, int64."""


@runtime_checkable
class Readable(Protocol):
    """A workload whose samples can be read."""

    def samples(self, rules: TokenRules, vocab_size: int, moved: Moved) -> Samples:
        """The workload's samples; ``UserError`` if data is missing or changed, or only shapes are known."""
