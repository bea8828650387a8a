"""Estimates of the time that a sequence adds to a packed chunk, from packs of equal sequences.

A sequence alone pays for launches and for products too small to be efficient; in a chunk with others it does not. So a
chunk's time is not the sum of what its sequences take alone, but of what each adds, and of what a chunk costs anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from entrain_bench.base.arithmetic import log2
from entrain_bench.base.arrays import FloatArray, IntArray, offsets_from_counts

if TYPE_CHECKING:
    from entrain_bench.costs.roofline import PassTimes

# Lengths of the sequences in the measured packs: 16 tokens to 188,000, a quarter more each time.
LENGTHS = np.unique([round(16 * 1.25**step) for step in range(43)])
# Tokens of a measured pack, at least; twice as many in the other pack of the same sequences.
PACK_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class PackTimes:
    """Seconds of a layer of each kind, communication included: of forwards, backwards and, if split, weight passes.

    Attributes:
        added_s: by one sequence of each of ``LENGTHS`` ``[passes, lengths, kinds]``.
        chunk_s: by a chunk, whatever is in it ``[passes, kinds]``.
        least_s: that a chunk takes ``[passes, kinds]``.
    """

    added_s: FloatArray
    chunk_s: FloatArray
    least_s: FloatArray

    def of(self, lengths: IntArray) -> FloatArray:
        """Return the seconds that sequences of the given lengths add to a pack ``[passes, sequences, kinds]``.

        The time of a token is linear in the length between measured lengths and beyond them, as attention has it; below
        the shortest the time of a sequence is.
        """
        known = LENGTHS.astype(np.float64)
        at = np.asarray(lengths, np.float64)
        right = np.clip(np.searchsorted(known, at), 1, len(known) - 1)
        left_s = self.added_s[:, right - 1]
        right_s = self.added_s[:, right]
        share = ((at - known[right - 1]) / (known[right] - known[right - 1]))[:, None]
        weight_left = np.where(at < known[0], 1.0, at / known[right - 1])[:, None]
        weight_right = np.where(at < known[0], 1.0, at / known[right])[:, None]
        return np.asarray(np.maximum((1.0 - share) * weight_left * left_s + share * weight_right * right_s, 0.0))


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
    columns = [
        [kind.forward_s + kind.forward_comm_s for kind in measured],
        [kind.backward_s + kind.backward_comm_s for kind in measured],
    ]
    if weights := [kind.weight_s for kind in measured if kind.weight_s is not None]:
        columns.append(weights)
    passes = np.stack([np.stack(column, axis=1) for column in columns])
    once = passes[:, 1::2]
    twice = passes[:, 2::2]
    added = (twice - once) / count
    return PackTimes(added, np.maximum((once - count * added).mean(axis=1), 0.0), passes[:, 0])


def smoothed_over_lengths(values: FloatArray, lengths: IntArray) -> FloatArray:
    """Return means of values of about the same length ``[values]``: in steps of half an octave, interpolated.

    Values of 1 stay 1, to the last bit.
    """
    at = 2.0 * log2(np.maximum(lengths, 1))
    left = np.floor(at).astype(np.int64)
    share = at - left
    step = np.concatenate([left, left + 1])
    part = np.concatenate([1.0 - share, share])
    weight = np.bincount(step, part)
    mean = np.bincount(step, part * np.tile(values, 2)) / np.where(weight > 0, weight, 1.0)
    return np.asarray(mean[left] + share * (mean[left + 1] - mean[left]))
