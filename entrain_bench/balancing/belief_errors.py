"""How wrong estimates are made: by sample (``belief_error``) and by length (``belief_bias``)."""

from __future__ import annotations

from zlib import crc32

import numpy as np

from entrain_bench.base.arithmetic import GOLDEN, log2, mix, sine_of_turns, uniform
from entrain_bench.base.arrays import FloatArray, IntArray

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
