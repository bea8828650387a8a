"""Measured times of single layers, and what each sequence adds to a packed chunk.

A sequence alone pays for launches and for products too small to be efficient; in a chunk with others it does not. So a
chunk's time is not the sum of what its sequences take alone, but of what each adds, and of what a chunk costs anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from entrain_bench.base.arithmetic import fit_polynomial
from entrain_bench.base.arrays import FloatArray, IntArray, offsets_from_counts
from entrain_bench.costs.layer_times import PassTimes
from entrain_bench.costs.sharding import LayerTraffic, layer_traffic
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program.layout import ModuleLayout
from entrain_bench.specs.model import ModuleSpec

# Sequence lengths at which layers are profiled (arXiv:2605.27918, section 4.1).
PROFILED_TOKENS = np.array([64, 256, 1024, 4096, 16384])
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


class _Means(Protocol):
    """Mean units of modules (``ProfiledSamples``)."""

    def mean_units(self, module: ModuleSpec) -> tuple[float, float, float]: ...


@dataclass(slots=True, eq=False)
class LayerProfile:
    """Measured layers; each measurement and each fit is made once."""

    _truth: CostTruth
    _samples: _Means
    _fits: dict[tuple[str, int, int], FloatArray] = field(init=False, default_factory=dict)
    _passes: dict[tuple[str, int, int, int], tuple[FloatArray, FloatArray]] = field(init=False, default_factory=dict)
    _packs: dict[tuple[str, int, int, bool], PackTimes] = field(init=False, default_factory=dict)

    def measure(self, module: ModuleSpec, lengths: IntArray, tp: int, cp: int) -> list[PassTimes]:
        """Return measured times of one layer of each kind on one packed microbatch with sequences of these lengths."""
        return self.measure_packs(module, lengths, np.array([0, len(lengths)]), tp, cp)

    def layer_s(self, module: ModuleSpec, lengths: IntArray, tp: int, cp: int) -> FloatArray:
        """Return measured forward and backward seconds of every layer on one packed microbatch ``[layers]``."""
        kind_s = np.array([float(times.total_s[0]) for times in self.measure(module, lengths, tp, cp)])
        return kind_s[module.layer_kind]

    def measure_packs(
        self, module: ModuleSpec, lengths: IntArray, offsets: IntArray, tp: int, cp: int, split: bool = False
    ) -> list[PassTimes]:
        """Return ``measure`` for several packed microbatches whose sequences are CSR rows, each ``[microbatches]``.

        With ``split`` a separate pass computes weight gradients.
        """
        times = self._truth.layer_times
        lengths = np.asarray(lengths)
        return times.layers_s(
            module, times.loads(module, lengths, offsets, self._labelled(module, lengths)), tp, cp, split
        )

    def _labelled(self, module: ModuleSpec, lengths: IntArray) -> IntArray | None:
        """Labelled tokens of sequences of these lengths with the workload's mean share; None where none are told."""
        if module.layers[-1].labelled is None:
            return None
        return np.rint(lengths * self._samples.mean_units(module)[2]).astype(np.int64)

    def forward_fit(self, module: ModuleSpec, tp: int, cp: int) -> FloatArray:
        """Coefficients of ``a x^2 + b x + c`` for the forward of each layer kind ``[kinds, 3]``, seconds.

        Linear regression over ``PROFILED_TOKENS`` (arXiv:2605.27918, section 4.1).
        """
        key = (module.name, tp, cp)
        if key not in self._fits:
            measured = [self.measure(module, np.array([tokens]), tp, cp) for tokens in PROFILED_TOKENS]
            forward = np.array([[(kind.forward_s + kind.forward_comm_s)[0] for kind in kinds] for kinds in measured])
            self._fits[key] = np.stack([fit_polynomial(PROFILED_TOKENS, times, 2) for times in forward.T])
        return self._fits[key]

    def pack_times(self, module: ModuleSpec, tp: int, cp: int, split: bool = False) -> PackTimes:
        """Return the seconds that each sequence adds to a packed chunk, and the constant of a chunk.

        With ``split`` a separate pass computes weight gradients.
        """
        key = (module.name, tp, cp, split)
        if key not in self._packs:
            lengths, offsets = probes()
            self._packs[key] = pack_times(self.measure_packs(module, lengths, offsets, tp, cp, split))
        return self._packs[key]

    def traffic(self, module: ModuleSpec, placed: ModuleLayout) -> LayerTraffic:
        """Return measured times of the collectives of each layer with sharded weights."""
        return layer_traffic(module, placed, self._truth.cluster, self._truth.memory.gradient_bytes)

    def mean_microbatch_s(
        self, module: ModuleSpec, tp: int, cp: int, global_batch: int, num_microbatches: int
    ) -> tuple[FloatArray, FloatArray]:
        """Return measured forward and backward seconds of every layer on a mean microbatch ``[layers]``.

        ``num_microbatches`` of all replicas together hold ``global_batch`` mean samples.
        """
        units, length, _ = self._samples.mean_units(module)
        count = max(1, round(units * global_batch / num_microbatches))
        key = (module.name, count, tp, cp)
        if key not in self._passes:
            times = self.measure(module, np.full(count, max(1, round(length))), tp, cp)
            forward = np.array([float((kind.forward_s + kind.forward_comm_s)[0]) for kind in times])
            backward = np.array([float((kind.backward_s + kind.backward_comm_s)[0]) for kind in times])
            self._passes[key] = forward[module.layer_kind], backward[module.layer_kind]
        return self._passes[key]
