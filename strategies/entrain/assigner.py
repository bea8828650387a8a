"""Entrain's hierarchical microbatch assignment (Algorithm 3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entrain_bench.arrays import FloatArray, IntArray
from entrain_bench.errors import require
from entrain_bench.program.assignment import Assignment, same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.strategy.profile import Profile

from .balance import (
    assign_microbatches,
    assign_replicas,
    bottleneck_matching,
    members_of,
    nearest_reachable,
    subset_sums,
)


@dataclass(frozen=True, slots=True)
class EntrainAssigner:
    """Balances encoder work between microbatches, then defers LLM work inside pairs of microbatches.

    Attributes:
        defer: whether LLM work is deferred (steps d to f); without, microbatches keep their samples.
        num_bins: resolution of the subset-sum program: the heaviest microbatch of a replica spans this many bins.
    """

    defer: bool = True
    num_bins: int = 512

    def __post_init__(self) -> None:
        require(self.num_bins >= 2, "strategy.assigner.num_bins", self.num_bins, "at least 2")

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Replica, encoder microbatch and LLM microbatch of every sample, from estimated workloads."""
        placed = layout.modules[-1]
        encoder_s, llm_s = profile.estimate_samples(shapes, placed.tp, placed.cp)
        by_encoder = np.argsort(-encoder_s, kind="stable")
        replica = assign_replicas(by_encoder, llm_s, placed.dp)
        encoder, llm = np.empty(len(shapes), np.int64), np.empty(len(shapes), np.int64)
        for r in range(placed.dp):
            mine = np.flatnonzero(replica == r)
            encoder[mine], llm[mine] = self.assign_replica(encoder_s[mine], llm_s[mine], layout.num_microbatches)
        return same_microbatches(profile.job.model, shapes, replica, encoder, llm)

    def assign_replica(
        self, encoder_s: FloatArray, llm_s: FloatArray, num_microbatches: int
    ) -> tuple[IntArray, IntArray]:
        """Encoder and LLM microbatch of each sample of one replica (steps b to f)."""
        count = effective_microbatches(encoder_s, num_microbatches)
        microbatch = assign_microbatches(stratified_order(encoder_s, llm_s), encoder_s, llm_s, count)
        if not self.defer:
            return microbatch, microbatch
        return defer_pairwise(microbatch, llm_s, count, self.num_bins)


def effective_microbatches(encoder_s: FloatArray, num_microbatches: int) -> int:
    """K_eff = min(K, floor(sum / max)) of a replica's encoder workloads (step b); K without encoder work."""
    heaviest = float(encoder_s.max(initial=0.0))
    if heaviest <= 0.0:
        return min(num_microbatches, len(encoder_s))
    # The quotient of equal workloads may fall just short of an integer.
    return max(1, min(num_microbatches, len(encoder_s), int(encoder_s.sum() / heaviest + 1e-9)))


def stratified_order(encoder_s: FloatArray, llm_s: FloatArray) -> IntArray:
    """Coarse samples (LLM work above the replica's median) first, then fine ones, each by falling encoder work."""
    fine = llm_s <= np.median(llm_s)
    return np.lexsort((-encoder_s, fine))


def defer_pairwise(
    microbatch: IntArray, llm_s: FloatArray, num_microbatches: int, num_bins: int
) -> tuple[IntArray, IntArray]:
    """Pair overloaded with underloaded microbatches and move LLM work to the partner (steps d to f).

    The heavier half is overloaded. With an odd number the median microbatch stays unpaired and comes last.

    Args:
        microbatch: microbatch of each sample before pairing ``[samples]``.
        llm_s: estimated LLM workload ``[samples]``.
        num_microbatches: their number.
        num_bins: bins that the heaviest microbatch spans in the subset-sum program.

    Returns:
        Encoder microbatch (the pairs interleaved: overloaded, then its partner) and LLM microbatch ``[samples]``.
    """
    load = np.bincount(microbatch, weights=llm_s, minlength=num_microbatches)
    falling = np.argsort(-load, kind="stable")
    half = num_microbatches // 2
    overloaded, underloaded = falling[:half], falling[num_microbatches - half :]
    order = np.empty(num_microbatches, np.int64)
    if half == 0 or load.max() <= 0:
        return microbatch, microbatch
    members = np.argsort(microbatch, kind="stable")
    bounds = np.searchsorted(microbatch[members], np.arange(num_microbatches + 1))
    bin_s = float(load.max()) / num_bins
    tables, sizes, moved, moved_s = [], [], np.zeros((half, half), np.int64), np.zeros((half, half))
    for i, over in enumerate(overloaded):
        samples = members[bounds[over] : bounds[over + 1]]
        size = np.rint(llm_s[samples] / bin_s).astype(np.int64)
        last, seconds = subset_sums(size, llm_s[samples])
        delta = np.rint((load[over] - load[underloaded]) / 2 / bin_s).astype(np.int64)
        moved[i] = nearest_reachable(last, delta)
        moved_s[i] = seconds[moved[i]]
        tables.append((samples, last))
        sizes.append(size)
    pair_s = np.maximum(load[overloaded][:, None] - moved_s, load[underloaded][None, :] + moved_s)
    matching = bottleneck_matching(pair_s, load[overloaded])
    order[overloaded] = 2 * np.arange(half)
    order[underloaded[matching.partner]] = 2 * np.arange(half) + 1
    if num_microbatches % 2:
        order[falling[half]] = num_microbatches - 1
    encoder = order[microbatch]
    llm = encoder.copy()
    for i, (samples, last) in enumerate(tables):
        if not matching.defers[i]:
            continue
        chosen = members_of(last, sizes[i], int(moved[i, matching.partner[i]]))
        llm[samples[chosen]] = 2 * i + 1
    return encoder, llm
