"""Pure parts of Algorithm 3: capacity-limited greedy assignment, subset choice, bottleneck matching."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from entrain_bench.arrays import BoolArray, FloatArray, IntArray


@njit(cache=True)
def assign_replicas(order, llm_s, num_replicas):  # type: ignore[no-untyped-def]
    """Replica of each sample: in the given order, the least-loaded replica (by ``llm_s``) with a free place.

    Every replica receives equally many samples (step a of the digest, its capacity ambiguity decided so).
    """
    capacity = len(order) // num_replicas
    replica = np.empty(len(order), np.int64)
    load = np.zeros(num_replicas)
    count = np.zeros(num_replicas, np.int64)
    for sample in order:
        best = -1
        for r in range(num_replicas):
            if count[r] < capacity and (best < 0 or load[r] < load[best]):
                best = r
        replica[sample] = best
        load[best] += llm_s[sample]
        count[best] += 1
    return replica


@njit(cache=True)
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


@njit(cache=True)
def subset_sums(sizes, weights):  # type: ignore[no-untyped-def]
    """Subsets of integer sizes by their sum, for every total up to that of all.

    Returns:
        The last item of a subset with that total, -1 if there is none and -2 for the empty one (following ``total -
        sizes[last]`` names the others), and the sum of the subset's ``weights``.
    """
    limit = sizes.sum()
    last = np.full(limit + 1, -1, np.int64)
    last[0] = -2
    weight = np.zeros(limit + 1)
    for item in range(len(sizes)):
        size = sizes[item]
        for total in range(limit, size - 1, -1):
            if last[total] == -1 and last[total - size] != -1:
                last[total] = item
                weight[total] = weight[total - size] + weights[item]
    return last, weight


@njit(cache=True)
def nearest_reachable(last, targets):  # type: ignore[no-untyped-def]
    """The reachable total nearest to each target (the smaller of two equally near)."""
    best = np.empty(len(targets), np.int64)
    for index in range(len(targets)):
        target = targets[index]
        for distance in range(len(last) + target + 1):
            low, high = target - distance, target + distance
            if 0 <= low < len(last) and last[low] != -1:
                best[index] = low
                break
            if 0 <= high < len(last) and last[high] != -1:
                best[index] = high
                break
    return best


def members_of(last: IntArray, sizes: IntArray, total: int) -> IntArray:
    """Items of the subset with the given reachable sum."""
    members = []
    while total > 0:
        item = int(last[total])
        members.append(item)
        total -= int(sizes[item])
    return np.array(members, np.int64)


@dataclass(frozen=True, slots=True)
class Matching:
    """Partners of overloaded microbatches.

    Attributes:
        bottleneck: T*, the largest LLM workload that remains.
        partner: underloaded microbatch of each overloaded one ``[overloaded]``.
        defers: whether that pair moves work ``[overloaded]``.
    """

    bottleneck: float
    partner: IntArray
    defers: BoolArray


def bottleneck_matching(pair_s: FloatArray, alone_s: FloatArray) -> Matching:
    """Smallest T such that every overloaded microbatch is below T alone or matched to a distinct partner below T.

    Binary search over all pair and stand-alone values; a maximum bipartite matching decides each (step e).

    Args:
        pair_s: bottleneck V of deferring from overloaded i to underloaded j ``[n, n]``.
        alone_s: workload of each overloaded microbatch by itself ``[n]``.
    """
    candidates = np.unique(np.concatenate([pair_s.ravel(), alone_s]))
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if _match(pair_s, alone_s, candidates[middle]) is not None:
            high = middle
        else:
            low = middle + 1
    partner = _match(pair_s, alone_s, candidates[low])
    assert partner is not None, "the largest candidate is above every stand-alone workload"
    defers = partner >= 0
    free = np.setdiff1d(np.arange(len(alone_s)), partner[defers])
    partner = partner.copy()
    partner[~defers] = free
    return Matching(float(candidates[low]), partner, defers)


def _match(pair_s: FloatArray, alone_s: FloatArray, limit: float) -> IntArray | None:
    """Partners of the microbatches above the limit, -1 for the others; None if they cannot all be matched."""
    critical = np.flatnonzero(alone_s > limit)
    partner = np.full(len(alone_s), -1)
    if critical.size:
        graph = csr_array(pair_s[critical] <= limit)
        partner[critical] = maximum_bipartite_matching(graph, perm_type="column")
        if np.any(partner[critical] < 0):
            return None
    return partner
