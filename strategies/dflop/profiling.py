"""DFLOP's profiling engine (arXiv:2603.25120, section 1 of its system): throughputs by shape and tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entrain_bench.balancing.planning import mean_length
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.shapes import SampleShapes

# Grids of the released code (BDAI-Research/DFLOP, 60e86d8).
ENCODER_BATCHES = np.array([1, 2, 4, 8, 16, 32, 64])
LLM_TOKENS = np.array([1024, 2048, 4096, 8192])
# Length of the short sequences that leave of a microbatch nearly its linear part alone.
SHORT_TOKENS = 128
# FLOPs of a forward and a backward relative to the forward's.
BOTH_PASSES = 3.0
# An extrapolated throughput is at least this share of the least measured one, and at most the greatest: a line that
# rises past it has Algorithm 1 choose microbatches of 60 samples, which never attain it.
LEAST = 0.5


@dataclass(frozen=True, slots=True)
class ThroughputTable:
    """Model FLOP/s of one GPU in both passes over a size, linear between and beyond points, within limits."""

    sizes: FloatArray
    flops_per_s: FloatArray

    def at(self, size: FloatArray | float) -> FloatArray:
        """Throughput at the given sizes, same shape."""
        wanted = np.asarray(size, np.float64)
        slope = np.diff(self.flops_per_s) / np.diff(self.sizes)
        value = np.interp(wanted, self.sizes, self.flops_per_s)
        value += (
            np.minimum(wanted - self.sizes[0], 0.0) * slope[0] + np.maximum(wanted - self.sizes[-1], 0.0) * slope[-1]
        )
        return np.asarray(np.clip(value, LEAST * self.flops_per_s.min(), self.flops_per_s.max()))


@dataclass(frozen=True, slots=True)
class EncoderCost:
    """Belief about an encoder at one TP and CP; its throughput depends on the effective batch, in average items."""

    module: ModuleSpec
    table: ThroughputTable
    ranks: int

    def seconds(self, flops: FloatArray, batch: FloatArray | float, pp: IntArray | int) -> FloatArray:
        """Both passes on one of ``pp`` stages for given forward FLOPs, in a batch of so many average items."""
        return np.asarray(BOTH_PASSES * flops / (self.table.at(batch) * self.ranks * pp))


@dataclass(frozen=True, slots=True)
class LlmCost:
    """Belief about the LLM at one TP and CP: attention by sequence, everything else by the packed length."""

    module: ModuleSpec
    attention: ThroughputTable
    linear: ThroughputTable
    ranks: int

    def seconds(self, lengths: IntArray, packed: FloatArray | float, pp: IntArray | int) -> FloatArray:
        """Both passes on one of ``pp`` stages for each sequence, in microbatches of ``packed`` tokens (broadcasts)."""
        attention = attention_flops(self.module, lengths)
        linear = self.module.forward_flops(lengths) - attention
        return np.asarray(
            BOTH_PASSES
            * (attention / self.attention.at(lengths.astype(np.float64)) + linear / self.linear.at(packed))
            / (self.ranks * pp)
        )


def encoder_cost(profile: Profile, module: ModuleSpec, item_tokens: int, tp: int, cp: int = 1) -> EncoderCost:
    """Measure an encoder on batches of items of the average length."""
    lengths = np.full(1, item_tokens)
    flops = BOTH_PASSES * float(module.forward_flops(lengths)[0])
    seconds = np.array(
        [profile.layers.layer_s(module, np.full(batch, item_tokens), tp, cp).sum() for batch in ENCODER_BATCHES]
    )
    thr = ENCODER_BATCHES * flops / (seconds * tp * cp)
    return EncoderCost(module, ThroughputTable(ENCODER_BATCHES.astype(np.float64), thr), tp * cp)


def llm_cost(profile: Profile, module: ModuleSpec, tp: int, cp: int = 1) -> LlmCost:
    """Measure the LLM on one sequence and on as many tokens cut into short ones.

    The authors skip attention in a second run; here ``SHORT_TOKENS`` / tokens of it are left, so the difference of both
    times is the rest. Communication counts as linear. Attention is never believed to be faster than the device's peak.
    """
    attention = np.zeros(len(LLM_TOKENS))
    linear = np.zeros(len(LLM_TOKENS))
    peak = profile.job.cluster.device.peak_bf16_flops
    for index, tokens in enumerate(LLM_TOKENS):
        one = np.array([tokens])
        full_s = float(profile.layers.layer_s(module, one, tp, cp).sum())
        short = np.full(tokens // SHORT_TOKENS, SHORT_TOKENS)
        cut_s = float(profile.layers.layer_s(module, short, tp, cp).sum())
        flops = BOTH_PASSES * float(attention_flops(module, one)[0])
        least_s = flops / (peak * tp * cp)
        attention_s = min(max((full_s - cut_s) / (1 - SHORT_TOKENS / tokens), least_s), full_s / 2 + least_s)
        rest = BOTH_PASSES * float(module.forward_flops(one)[0]) - flops
        attention[index] = flops / (attention_s * tp * cp)
        linear[index] = rest / (max(full_s - attention_s, rest / (peak * tp * cp)) * tp * cp)
    sizes = LLM_TOKENS.astype(np.float64)
    return LlmCost(module, ThroughputTable(sizes, attention), ThroughputTable(sizes, linear), tp * cp)


def attention_flops(module: ModuleSpec, lengths: IntArray) -> FloatArray:
    """Forward FLOPs of attention in the whole module, per sequence."""
    total = np.zeros(lengths.shape)
    for count, kind in zip(np.bincount(module.layer_kind), module.kinds, strict=True):
        if kind.attention:
            total += count * kind.attention.flops(lengths)
    return total


@dataclass(frozen=True, slots=True)
class DataShapes:
    """Means and maxima of the profiled samples: all that the optimizer knows of the data."""

    items: tuple[float, ...]  # of each encoder in a sample, on average ``[encoders]``
    item_tokens: tuple[int, ...]  # encoder tokens an item ``[encoders]``; 1 where there are no items
    sequence_tokens: int  # LLM tokens of a sample, on average
    most_items: tuple[int, ...]  # of each encoder in one sample ``[encoders]``
    most_sequence_tokens: int  # LLM tokens of the longest sample


def data_shapes(profile: Profile, shapes: SampleShapes) -> DataShapes:
    """The data profiler's averages and maxima."""
    items = []
    tokens = []
    most = []
    for module in profile.job.model.encoders:
        units = module.units(shapes)
        items.append(len(units) / len(shapes))
        tokens.append(mean_length(module.lengths(shapes, units)))
        most.append(int(np.bincount(shapes.item_sample[units], minlength=1).max()))
    longest = int(shapes.llm_tokens.max())
    return DataShapes(tuple(items), tuple(tokens), mean_length(shapes.llm_tokens), tuple(most), longest)
