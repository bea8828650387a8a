"""Entrain's hierarchical microbatch assignment (Algorithm 3)."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.compiled import njit
from entrain_bench.base.errors import require
from entrain_bench.base.hosttime import each_replica_alone
from entrain_bench.program.assignment import Assignment, same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes

from .deferral import defer_pairwise


@njit()
def assign_replicas(order, llm_s, num_replicas):  # type: ignore[no-untyped-def]
    """Replica of each sample: in the given order, the least-loaded replica (by ``llm_s``) with a free place.

    Every replica receives equally many samples (step a of the digest, its capacity ambiguity decided so).
    """
    capacity = len(order) // num_replicas
    replica = np.empty(len(order), np.int64)
    count = np.zeros(num_replicas, np.int64)
    # Equally loaded by rising index, which is a heap.
    least = [(0.0, r) for r in range(num_replicas)]
    for sample in order:
        load, best = heappop(least)
        replica[sample] = best
        count[best] += 1
        if count[best] < capacity:
            heappush(least, (load + llm_s[sample], best))
    return replica


@njit()
def assign_microbatches(order, encoder_s, llm_s, num_microbatches):  # type: ignore[no-untyped-def]
    """Microbatch of each sample: in the given order, the one with the least encoder work so far.

    Ties go to the least LLM work; samples without encoder work choose by LLM work alone, for the encoder does not tell.
    """
    microbatch = np.empty(len(order), np.int64)
    encoder = np.zeros(num_microbatches)
    llm = np.zeros(num_microbatches)
    for sample in order:
        best = 0
        for m in range(1, num_microbatches):
            if encoder_s[sample] > 0.0 and encoder[m] != encoder[best]:
                better = encoder[m] < encoder[best]
            else:
                better = llm[m] < llm[best]
            if better:
                best = m
        microbatch[sample] = best
        encoder[best] += encoder_s[sample]
        llm[best] += llm_s[sample]
    return microbatch


# A pair's table of sums has as many entries as its samples span bins, each of some bytes.
MAX_BINS = 2**20


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
        fits = 2 <= self.num_bins <= MAX_BINS
        require(fits, "strategy.assigner.num_bins", self.num_bins, f"at least 2, at most {MAX_BINS}")

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Replica, encoder microbatch and LLM microbatch of every sample, from estimated workloads."""
        placed = layout.modules[-1]
        encoder_s, llm_s = profile.estimates.samples(shapes, placed.tp, placed.cp)
        by_encoder = np.argsort(-encoder_s, kind="stable")
        replica = assign_replicas(by_encoder, llm_s, placed.dp)
        # Samples of each replica in order of arrival; all have equally many.
        samples = np.argsort(replica, kind="stable").reshape(placed.dp, -1)
        encoder = np.empty(len(shapes), np.int64)
        llm = np.empty(len(shapes), np.int64)
        with each_replica_alone(placed.dp):
            own_encoder_s = encoder_s[samples]
            own_llm_s = llm_s[samples]
            order = stratified_order(own_encoder_s, own_llm_s)
            count = effective_microbatches(own_encoder_s, layout.num_microbatches)
            bins = self.num_bins if self.defer else 0
            for r, mine in enumerate(samples):
                encoder[mine], llm[mine] = assign_in_replica(order[r], own_encoder_s[r], own_llm_s[r], count[r], bins)
        return same_microbatches(profile.job.model, shapes, replica, encoder, llm)


def effective_microbatches(encoder_s: FloatArray, num_microbatches: int) -> IntArray:
    """K_eff = min(K, floor(sum / max)) of each replica's encoder workloads (step b); K without encoder work.

    Workloads are estimates ``[replicas, samples]``.
    """
    heaviest = encoder_s.max(axis=1)
    most = min(num_microbatches, encoder_s.shape[1])
    # The quotient of equal workloads may fall just short of an integer.
    full = encoder_s.sum(axis=1) / np.where(heaviest > 0.0, heaviest, 1.0) + 1e-9
    return np.where(heaviest > 0.0, np.clip(full.astype(np.int64), 1, most), most)


def stratified_order(encoder_s: FloatArray, llm_s: FloatArray) -> IntArray:
    """Samples of each replica: coarse (LLM work above the replica's median) first, then fine, by falling encoder work.

    Workloads and result are ``[replicas, samples]``.
    """
    fine = llm_s <= np.median(llm_s, axis=1, keepdims=True)
    return np.lexsort((-encoder_s, fine), axis=1)


@njit()
def assign_in_replica(order, encoder_s, llm_s, num_microbatches, num_bins):  # type: ignore[no-untyped-def]
    """Encoder and LLM microbatch of each sample of one replica (steps c to f) ``[samples]``.

    Samples are placed in the given order, by estimated workloads ``[samples]``; 0 bins defer nothing.
    """
    microbatch = assign_microbatches(order, encoder_s, llm_s, num_microbatches)
    if num_bins == 0:
        return microbatch, microbatch
    return defer_pairwise(microbatch, llm_s, num_microbatches, num_bins)
