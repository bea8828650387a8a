"""Believed work of modules on lanes, and how encoder work is shared out among the ranks of a replica."""

from __future__ import annotations

import numpy as np
from numba import njit

from entrain_bench.balancing.beliefs import packed_units_s
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arithmetic import matmul
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.compiled import inlined
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.shapes import SampleShapes

# Bisection steps of a level: to a part in 10^12 of the greatest.
LEVEL_STEPS = 40


def unit_layers_s(
    profile: Profile, module: ModuleSpec, shapes: SampleShapes, tp: int, cp: int, recompute: bool
) -> FloatArray:
    """What each unit adds to both passes of a layer of each kind, recomputation included ``[units, kinds]``."""
    forward, backward = packed_units_s(module, shapes, tp, cp, profile)
    return np.asarray(forward + backward + forward * _remade(module, recompute))


def chunk_layers_s(profile: Profile, module: ModuleSpec, tp: int, cp: int, recompute: bool) -> FloatArray:
    """What a chunk costs besides in a layer of each kind, likewise ``[kinds]``."""
    forward, backward = profile.pack_times(module, tp, cp).chunk_s
    return np.asarray(forward + backward + forward * _remade(module, recompute))


def chunk_tokens(profile: Profile, module: ModuleSpec, lengths: IntArray, tp: int, cp: int, overhead: float) -> float:
    """Tokens of a chunk of which a share of its time is what a chunk costs anyway.

    Args:
        profile: what is known.
        module: the module.
        lengths: of its units; one of their mean length counts ``[units]``.
        tp: its TP.
        cp: its CP.
        overhead: the share, above 0 and below 1.
    """
    if not len(lengths):
        return 1.0
    mean = max(1, round(float(lengths.mean())))
    times = profile.pack_times(module, tp, cp)
    counts = np.bincount(module.layer_kind, minlength=len(module.kinds))
    added_s = float(matmul(times.of(np.array([mean]))[:, 0], counts).sum())
    fixed_s = float(matmul(times.chunk_s, counts).sum())
    return max(1.0, mean * (fixed_s / max(added_s, 1e-12)) * (1 / overhead - 1))


def _remade(module: ModuleSpec, recompute: bool) -> FloatArray:
    return np.array([recompute and kind.remade_share for kind in module.kinds], np.float64)


def shares_of(base_s: FloatArray, cost_s: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Shares of an encoder's work for each of its copies, so that the busiest lane is least busy (water filling).

    Args:
        base_s: what the lanes of each copy's stages do anyway ``[replicas, copies, stages]``.
        cost_s: seconds of all the work on each stage ``[replicas, stages]``.

    Returns:
        Shares ``[replicas, copies]``, each row's sum 1, and the busiest of the lanes that take some ``[replicas]``.
    """
    return tuple(_shares(np.ascontiguousarray(base_s), np.ascontiguousarray(cost_s)))


@njit(cache=True)
def _shares(base_s, cost_s):  # type: ignore[no-untyped-def]
    replicas, copies, stages = base_s.shape
    shares, high = np.zeros((replicas, copies)), np.zeros(replicas)
    for own in range(replicas):
        low_s, most_s = np.inf, 0.0
        for stage in range(stages):
            most_s = max(most_s, cost_s[own, stage])
        for copy in range(copies):
            low_s = min(low_s, base_s[own, copy].max())
        high_s = low_s + most_s
        for _ in range(LEVEL_STEPS):
            middle_s = (low_s + high_s) / 2
            if _taken(middle_s, base_s[own], cost_s[own], shares[own]) >= 1:
                high_s = middle_s
            else:
                low_s = middle_s
        total = _taken(high_s, base_s[own], cost_s[own], shares[own])
        for copy in range(copies):
            shares[own, copy] = shares[own, copy] / total if total > 0 else 1 / copies
        high[own] = high_s
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


def split_chain(layer_s: FloatArray, base_s: FloatArray) -> tuple[int, ...]:
    """Consecutive layers for each of some lanes that have work already, so that the busiest is least busy.

    Every lane gets a layer; of equally good splits the one whose later lanes have most.

    Args:
        layer_s: of each layer ``[layers]``.
        base_s: what each lane has ``[lanes]``.
    """
    prefix = np.concatenate(([0.0], np.cumsum(layer_s)))
    return tuple(np.diff(_cuts(prefix, np.ascontiguousarray(base_s, np.float64))).tolist())


@njit(cache=True)
def _cuts(prefix, base_s):  # type: ignore[no-untyped-def]
    """First layer of every lane, and the number of layers ``[lanes + 1]``."""
    lanes, count = len(base_s), len(prefix) - 1
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    cut = np.zeros((lanes, count + 1), np.int64)
    for lane in range(lanes):
        longer = np.full(count + 1, np.inf)
        for end in range(lane + 1, count + 1):
            for first in range(lane, end):
                busiest = max(best[first], prefix[end] - prefix[first] + base_s[lane])
                # What is as good but for rounding is no better.
                if busiest < longer[end] * (1 - 1e-9):
                    longer[end], cut[lane, end] = busiest, first
        best = longer
    bounds = np.zeros(lanes + 1, np.int64)
    bounds[lanes] = count
    for lane in range(lanes - 1, -1, -1):
        bounds[lane] = cut[lane, bounds[lane + 1]]
    return bounds


def stage_work(module: ModuleSpec, layers_per_stage: tuple[int, ...], kinds_s: FloatArray) -> FloatArray:
    """Seconds of each stage from those of a layer of each kind ``[..., stages]``."""
    return matmul(kinds_s, module.kind_counts(layers_per_stage).T)
