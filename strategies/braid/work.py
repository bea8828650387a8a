"""Believed work of modules on lanes, and how encoder work is shared out among the ranks of a replica."""

from __future__ import annotations

import numpy as np

from entrain_bench.balancing.chunk_estimates import packed_units_s
from entrain_bench.balancing.planning import mean_length
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arithmetic import matmul
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.compiled import inlined, njit
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.specs.shapes import SampleShapes

# Bisection steps of a level: to a part in 10^12 of the greatest.
LEVEL_STEPS = 40
# Share of an encoder chunk's time that a chunk costs anyway, about: what its tokens follow from. Items are never cut.
OVERHEAD = 0.05


def others(model: ModelSpec) -> dict[int, ModuleSpec]:
    """All modules but the LLM, by their positions in the model."""
    return {index: module for index, module in enumerate(model.modules) if index != model.llm_index}


def unit_layers_s(
    profile: Profile, module: ModuleSpec, shapes: SampleShapes, tp: int, cp: int, recompute: bool
) -> FloatArray:
    """Estimated seconds that a unit adds to both passes of a layer, with recomputation ``[units, kinds]``."""
    forward, backward = packed_units_s(module, shapes, tp, cp, profile)
    return np.asarray(forward + backward + forward * _remade(module, recompute))


def chunk_layers_s(profile: Profile, module: ModuleSpec, tp: int, cp: int, recompute: bool) -> FloatArray:
    """Estimated fixed seconds of a chunk in both passes of a layer, with recomputation ``[kinds]``."""
    forward, backward = profile.layers.pack_times(module, tp, cp).chunk_s
    return np.asarray(forward + backward + forward * _remade(module, recompute))


def chunk_tokens(profile: Profile, module: ModuleSpec, lengths: IntArray, tp: int, cp: int) -> float:
    """Tokens at which a chunk of units of mean length spends ``OVERHEAD`` of its time on what a chunk costs anyway."""
    if not len(lengths):
        return 1.0
    mean = mean_length(lengths)
    times = profile.layers.pack_times(module, tp, cp)
    counts = np.bincount(module.layer_kind, minlength=len(module.kinds))
    added_s = float(matmul(times.of(np.array([mean]))[:, 0], counts).sum())
    fixed_s = float(matmul(times.chunk_s, counts).sum())
    return max(1.0, mean * (fixed_s / max(added_s, 1e-12)) * (1 / OVERHEAD - 1))


def _remade(module: ModuleSpec, recompute: bool) -> FloatArray:
    return np.array([recompute and kind.remade_share for kind in module.kinds], np.float64)


def level_shares(base_s: FloatArray, cost_s: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Shares of an encoder's work for each of its copies, so that the busiest lane is least busy (water filling).

    ``base_s`` is what the lanes of each copy's stages do anyway ``[replicas, copies, stages]``, ``cost_s`` all the work
    on each stage ``[replicas, stages]``. Returns shares ``[replicas, copies]``, each row's sum 1, and the busiest of
    the lanes that take some ``[replicas]``.
    """
    return tuple(_shares(np.ascontiguousarray(base_s), np.ascontiguousarray(cost_s)))


@njit()
def _shares(base_s, cost_s):  # type: ignore[no-untyped-def]
    replicas, copies, stages = base_s.shape
    shares = np.zeros((replicas, copies))
    high = np.zeros(replicas)
    for replica in range(replicas):
        low_s = np.inf
        most_s = 0.0
        for stage in range(stages):
            most_s = max(most_s, cost_s[replica, stage])
        for copy in range(copies):
            low_s = min(low_s, base_s[replica, copy].max())
        high_s = low_s + most_s
        for _ in range(LEVEL_STEPS):
            middle_s = (low_s + high_s) / 2
            if _taken(middle_s, base_s[replica], cost_s[replica], shares[replica]) >= 1:
                high_s = middle_s
            else:
                low_s = middle_s
        total = _taken(high_s, base_s[replica], cost_s[replica], shares[replica])
        for copy in range(copies):
            shares[replica, copy] = shares[replica, copy] / total if total > 0 else 1 / copies
        high[replica] = high_s
    return shares, high


@inlined
def _taken(level_s, base_s, cost_s, share):  # type: ignore[no-untyped-def]
    """Share of the work that each copy can take below a level, and their sum."""
    total = 0.0
    for copy in range(len(base_s)):
        share[copy] = np.inf
        for stage in range(len(cost_s)):
            share[copy] = min(share[copy], (level_s - base_s[copy, stage]) / max(cost_s[stage], 1e-12))
        share[copy] = max(share[copy], 0.0)
        total += share[copy]
    return total


@njit()
def cuts(layer_s, stages):  # type: ignore[no-untyped-def]
    """First layers of some stages, and the number of layers, so that the busiest stage is least busy ``[stages + 1]``.

    Every stage gets a layer; of equally good splits the one whose later stages have most.
    """
    count = len(layer_s)
    prefix = np.zeros(count + 1)
    prefix[1:] = np.cumsum(layer_s)
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    cut = np.zeros((stages, count + 1), np.int64)
    for stage in range(stages):
        longer = np.full(count + 1, np.inf)
        # Later stages leave at least one layer each for themselves; the last one takes all that is left.
        least = count if stage == stages - 1 else stage + 1
        for end in range(least, count - (stages - 1 - stage) + 1):
            for first in range(stage, end):
                busiest = max(best[first], prefix[end] - prefix[first])
                # What is as good but for rounding is no better.
                if busiest < longer[end] * (1 - 1e-9):
                    longer[end] = busiest
                    cut[stage, end] = first
        best = longer
    bounds = np.zeros(stages + 1, np.int64)
    bounds[stages] = count
    for stage in range(stages - 1, -1, -1):
        bounds[stage] = cut[stage, bounds[stage + 1]]
    return bounds


@njit()
def split_evenly(llm_s, encoders_s, offsets, llm_blocks, grid, copies_abreast):  # type: ignore[no-untyped-def]
    """Split LLM and encoders evenly, each by itself; copies of encoders, alike in all segments, share the work out.

    Args:
        llm_s: seconds of each layer in a replica ``[layers]``.
        encoders_s: likewise, of one encoder after the other.
        offsets: where each encoder's layers begin, and the number of all ``[encoders + 1]``.
        llm_blocks: lanes of the LLM's stages ``[stages]``.
        grid: segments, stages of a copy of an encoder, lanes that such a stage takes.
        copies_abreast: copies of an encoder on one segment.

    Returns ``cuts`` of the LLM and of each encoder, and seconds of the busiest lane.
    """
    segments, stages, width = grid
    lanes = segments * stages * width
    copies = segments * copies_abreast
    bounds = np.zeros((len(offsets) - 1, stages + 1), np.int64)
    llm_bounds = cuts(llm_s, len(llm_blocks))
    busy_s = np.zeros(lanes)
    busy_s[llm_blocks] = _stage_sums(llm_s, llm_bounds)
    for index in range(len(offsets) - 1):
        own_s = encoders_s[offsets[index] : offsets[index + 1]]
        bounds[index] = cuts(own_s, stages)
        cost_s = _stage_sums(own_s, bounds[index])
        base_s = np.zeros((1, copies, stages))
        for lane in range(lanes):
            segment = lane // (stages * width)
            stage = lane // width % stages
            for copy in range(segment * copies_abreast, (segment + 1) * copies_abreast):
                base_s[0, copy, stage] = max(base_s[0, copy, stage], busy_s[lane])
        shares = _shares(base_s, cost_s.reshape(1, stages))[0][0]
        for lane in range(lanes):
            segment = lane // (stages * width)
            stage = lane // width % stages
            own_shares = shares[segment * copies_abreast : (segment + 1) * copies_abreast]
            busy_s[lane] += own_shares.sum() / copies_abreast * cost_s[stage]
    return llm_bounds, bounds, busy_s.max()


@njit()
def _stage_sums(layer_s, bounds):  # type: ignore[no-untyped-def]
    """Seconds of each stage ``[stages]``."""
    total = np.empty(len(bounds) - 1)
    for stage in range(len(total)):
        total[stage] = layer_s[bounds[stage] : bounds[stage + 1]].sum()
    return total


def stage_work(module: ModuleSpec, layers_per_stage: tuple[int, ...], kinds_s: FloatArray) -> FloatArray:
    """Seconds of each stage from those of a layer of each kind ``[..., stages]``."""
    return matmul(kinds_s, module.kind_counts(layers_per_stage).T)
