"""What a sequence adds to the time of a packed chunk, learnt from packs of equal sequences.

A sequence alone pays for launches and for products too small to be efficient; in a chunk with others it does not. So a
chunk's time is not the sum of what its sequences take alone, but of what each adds, and of what a chunk costs anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from entrain_bench.base.arrays import FloatArray, IntArray, offsets_from_counts

if TYPE_CHECKING:
    from entrain_bench.costs.roofline import PassTimes

# Lengths of the sequences in the measured packs: 16 tokens to 131,072, a quarter more each time.
LENGTHS = np.unique([round(16 * 1.25**step) for step in range(41)])
# Tokens of a measured pack, at least; twice as many in the other pack of the same sequences.
PACK_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class PackTimes:
    """Seconds of a layer of each kind, communication included; first of forwards, then of backwards.

    Attributes:
        added_s: by one sequence of each of ``LENGTHS`` ``[2, lengths, kinds]``.
        chunk_s: by a chunk, whatever is in it ``[2, kinds]``.
        least_s: that a chunk takes ``[2, kinds]``.
    """

    added_s: FloatArray
    chunk_s: FloatArray
    least_s: FloatArray

    def of(self, lengths: IntArray) -> FloatArray:
        """What sequences of the given lengths add ``[2, sequences, kinds]``; linear between measured lengths."""
        known = LENGTHS.astype(np.float64)
        at = np.minimum(np.asarray(lengths, np.float64), known[-1])
        right = np.clip(np.searchsorted(known, at), 1, len(known) - 1)
        share = (at - known[right - 1]) / (known[right] - known[right - 1])
        below, above = self.added_s[:, right - 1], self.added_s[:, right]
        return np.asarray(np.maximum(below + share[:, None] * (above - below), 0.0))


def probes() -> tuple[IntArray, IntArray]:
    """Lengths and offsets of the packs to measure: of one token, then two of every length."""
    count = -(-PACK_TOKENS // LENGTHS)
    counts = np.concatenate(([1], np.stack([count, 2 * count], axis=1).ravel()))
    return np.repeat(np.concatenate(([1], np.repeat(LENGTHS, 2))), counts), offsets_from_counts(counts)


def pack_times(measured: Sequence[PassTimes]) -> PackTimes:
    """From the times of each kind on the packs of ``probes``.

    Twice the sequences take longer by what they add; what a pack takes besides is the chunk's, the mean of all lengths.
    """
    count = -(-PACK_TOKENS // LENGTHS)[:, None]
    passes = np.stack(
        [
            np.stack([kind.forward_s + kind.forward_comm_s for kind in measured], axis=1),
            np.stack([kind.backward_s + kind.backward_comm_s for kind in measured], axis=1),
        ]
    )
    once, twice = passes[:, 1::2], passes[:, 2::2]
    added = (twice - once) / count
    return PackTimes(added, np.maximum((once - count * added).mean(axis=1), 0.0), passes[:, 0])
