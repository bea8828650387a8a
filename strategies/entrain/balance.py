"""Pure parts of Algorithm 3, compiled: which replica and which microbatch a sample goes to (steps a to c)."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
from numba import njit


@njit(cache=True)
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
