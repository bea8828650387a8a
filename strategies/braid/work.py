"""Believed work of modules on lanes, and how encoder work is shared out among the ranks of a replica."""

from __future__ import annotations

import numpy as np

from entrain_bench.arithmetic import decisive, matmul
from entrain_bench.arrays import FloatArray, IntArray
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.strategy.beliefs import packed_units_s
from entrain_bench.strategy.profile import Profile

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
    return np.array([recompute and kind.recomputed and kind.backward_share > 0 for kind in module.kinds], np.float64)


def shares_of(base_s: FloatArray, cost_s: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Shares of an encoder's work for each of its copies, so that the busiest lane is least busy (water filling).

    Args:
        base_s: what the lanes of each copy's stages do anyway ``[replicas, copies, stages]``.
        cost_s: seconds of all the work on each stage ``[replicas, stages]``.

    Returns:
        Shares ``[replicas, copies]``, each row's sum 1, and the busiest of the lanes that take some ``[replicas]``.
    """
    cost = np.maximum(cost_s, 1e-12)[:, None]
    low = base_s.max(axis=2).min(axis=1)
    high = low + cost_s.max(axis=1)

    def taken(level: FloatArray) -> FloatArray:
        return np.maximum(((level[:, None, None] - base_s) / cost).min(axis=2), 0.0)

    for _ in range(LEVEL_STEPS):
        middle = (low + high) / 2
        enough = taken(middle).sum(axis=1) >= 1
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    shares = taken(high)
    total = shares.sum(axis=1, keepdims=True)
    even = np.full_like(shares, 1 / shares.shape[1])
    return np.where(total > 0, shares / np.maximum(total, 1e-300), even), high


def split_chain(layer_s: FloatArray, base_s: FloatArray) -> tuple[int, ...]:
    """Consecutive layers for each of some lanes that have work already, so that the busiest is least busy.

    Every lane gets a layer; of equally good splits the one whose later lanes have most.

    Args:
        layer_s: of each layer ``[layers]``.
        base_s: what each lane has ``[lanes]``.
    """
    count, prefix = len(layer_s), np.concatenate(([0.0], np.cumsum(layer_s)))
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    cuts = []
    span = prefix[None, :] - prefix[:, None]
    later = np.arange(count + 1)[:, None] < np.arange(count + 1)[None, :]
    for own in base_s:
        busiest = np.where(later, np.maximum(best[:, None], span + own), np.inf)
        cuts.append(_rounded_argmin(busiest))
        best = busiest.min(axis=0)
    bounds = [count]
    for cut in reversed(cuts):
        bounds.append(int(cut[bounds[-1]]))
    return tuple(np.diff(bounds[::-1]).tolist())


def _rounded_argmin(values: FloatArray) -> IntArray:
    """The first row of each column whose value counts as its least."""
    return np.asarray(decisive(np.where(np.isfinite(values), values, 1e300)).argmin(axis=0))


def stage_work(module: ModuleSpec, layers_per_stage: tuple[int, ...], kinds_s: FloatArray) -> FloatArray:
    """Seconds of each stage from those of a layer of each kind ``[..., stages]``."""
    return matmul(kinds_s, module.kind_counts(layers_per_stage).T)
