"""Estimated seconds of single units, with the estimation errors that the user sets.

``belief_error`` is an error by sample, ``belief_bias`` an error by length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self
from zlib import crc32

import numpy as np

from entrain_bench.balancing.correction import Corrector, shape_classes
from entrain_bench.balancing.layer_profile import LayerProfile
from entrain_bench.base.arithmetic import GOLDEN, log2, matmul, mix, sine_of_turns, uniform
from entrain_bench.base.arrays import FloatArray, IntArray, freeze
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.specs.shapes import SampleShapes

# A factor of 16 in length: estimates of small and of large units err in opposite directions.
BIAS_OCTAVES = 4.0


def length_bias(module: str, lengths: IntArray, seed: int, bias: float) -> FloatArray:
    """Return 1 + bias x sine of log2(length), with a period of ``BIAS_OCTAVES``; seed and module fix the phase."""
    if not bias:
        return np.ones(len(lengths))
    phase = np.random.default_rng([seed, crc32(module.encode())]).random()
    return np.asarray(1.0 + bias * sine_of_turns(log2(np.maximum(lengths, 1)) / BIAS_OCTAVES + phase))


def sample_error(module: str, sample_ids: IntArray, seed: int, error: float) -> FloatArray:
    """Return 1 + error x u with u uniform in [-1, 1]; seed, module and sample fix u (SplitMix64 hash)."""
    if not error:
        return np.ones(len(sample_ids))
    name = np.uint64((crc32(module.encode()) << 31) ^ seed)
    bits = mix((np.asarray(sample_ids).astype(np.uint64) + np.uint64(1)) * GOLDEN ^ name)
    return 1.0 + error * (2.0 * uniform(bits) - 1.0)


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


@dataclass(slots=True, eq=False)
class BatchCache:
    """Read-only estimates of the last batch, by key."""

    _shapes: SampleShapes | None = None
    _values: dict[tuple[object, ...], FloatArray] = field(default_factory=dict)

    def get(self, shapes: SampleShapes, key: tuple[object, ...], make: Callable[[], FloatArray]) -> FloatArray:
        """Return the value of a key for a batch; ``make`` computes it at the first call."""
        if self._shapes is not shapes:
            self._shapes = shapes
            self._values = {}
        values = self._values
        if key not in values:
            freeze(estimate := make())
            values[key] = estimate
        return values[key]


@dataclass(frozen=True, slots=True)
class UnitEstimates:
    """Estimated workload of single units (items of encoders and generators, samples of the LLM).

    Estimates are wrong, the same way each time a sample is seen (unless ``smoothed``): by up to ``belief_error``
    (relative) sample by sample, and by up to ``belief_bias`` for all units of one length.
    """

    _model: ModelSpec
    _layers: LayerProfile
    _seed: int
    _belief_error: float = 0.0
    _belief_bias: float = 0.0
    _smooth: bool = False
    _correction: Corrector = field(default_factory=Corrector)
    _cache: BatchCache = field(default_factory=BatchCache)

    def smoothed(self) -> Self:
        """See ``Profile.smoothed``."""
        return replace(self, _smooth=True)

    def corrected(self, correction: Corrector) -> Self:
        """See ``Profile.corrected``."""
        return replace(self, _correction=correction, _cache=BatchCache())

    def units(self, module: ModuleSpec, shapes: SampleShapes, tp: int, cp: int) -> FloatArray:
        """Return the estimated forward seconds of the whole module for each unit separately ``[units]``."""

        def made() -> FloatArray:
            counts = np.bincount(module.layer_kind, minlength=len(module.kinds))
            a, b, c = matmul(counts, self._layers.forward_fit(module, tp, cp))
            lengths = module.lengths(shapes, module.units(shapes)).astype(np.float64)
            exact = np.maximum((a * lengths + b) * lengths + c, 0.0)
            return np.asarray(exact * self.error_factor(module, shapes))

        return self.remember(shapes, ("forward", module.name, tp, cp), made)

    def error_factor(self, module: ModuleSpec, shapes: SampleShapes) -> FloatArray:
        """Return the erroneous over the exact estimate of each unit ``[units]``, for a strategy's own estimates."""

        def made() -> FloatArray:
            units = module.units(shapes)
            lengths = module.lengths(shapes, units)
            ids = shapes.sample_ids[module.owners(shapes, units)]
            factor = sample_error(module.name, ids, self._seed, self._belief_error)
            factor = factor * length_bias(module.name, lengths, self._seed, self._belief_bias)
            if self._smooth and len(factor):
                factor = smoothed_over_lengths(factor, lengths)
            if self._correction.ratios:
                index = [other.name for other in self._model.modules].index(module.name)
                factor = factor * self._correction.penalties(shape_classes(lengths, index))
            return factor

        return self.remember(shapes, ("error", module.name), made)

    def remember(self, shapes: SampleShapes, key: tuple[object, ...], make: Callable[[], FloatArray]) -> FloatArray:
        """Return the read-only estimate that ``make`` returns for a batch; estimates of the last batch are kept."""
        return self._cache.get(shapes, (self._smooth, *key), make)

    def samples(self, shapes: SampleShapes, tp: int, cp: int) -> tuple[FloatArray, FloatArray]:
        """Return the estimated forward seconds of each sample: all encoders together, and the LLM ``[samples]``."""
        encoder = np.zeros(len(shapes))
        for module in self._model.encoders:
            units = module.units(shapes)
            encoder += shapes.sum_items(units, self.units(module, shapes, tp, cp))
        return encoder, self.units(self._model.llm, shapes, tp, cp)
