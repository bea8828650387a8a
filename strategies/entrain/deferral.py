"""LLM work that moves to the partner of an overloaded microbatch, compiled (steps d to f of Algorithm 3)."""

from __future__ import annotations

import numpy as np
from numba import njit

from .matching import bottleneck_matching


@njit(cache=True)
def defer_pairwise(microbatch, llm_s, num_microbatches, num_bins):  # type: ignore[no-untyped-def]
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
    load = np.zeros(num_microbatches)
    for sample in range(len(microbatch)):
        load[microbatch[sample]] += llm_s[sample]
    falling, half = falling_order(load), num_microbatches // 2
    bin_s = load[falling[0]] / num_bins
    if half == 0 or bin_s <= 0.0:
        return microbatch, microbatch
    overloaded, underloaded = falling[:half], falling[num_microbatches - half :]
    moved, pair_s = np.empty((half, half), np.int64), np.empty((half, half))
    tables = []
    for i in range(half):
        samples = np.flatnonzero(microbatch == overloaded[i])
        sizes = np.rint(llm_s[samples] / bin_s).astype(np.int64)
        last, seconds = subset_sums(sizes, llm_s[samples])
        for j in range(half):
            over_s, under_s = load[overloaded[i]], load[underloaded[j]]
            moved[i, j] = nearest_reachable(last, round((over_s - under_s) / 2 / bin_s))
            pair_s[i, j] = max(over_s - seconds[moved[i, j]], under_s + seconds[moved[i, j]])
        tables.append((samples, sizes, last))
    matching = bottleneck_matching(pair_s, load[overloaded])
    place = np.full(num_microbatches, num_microbatches - 1)
    for i in range(half):
        place[overloaded[i]], place[underloaded[matching.partner[i]]] = 2 * i, 2 * i + 1
    encoder = place[microbatch]
    llm = encoder.copy()
    for i in range(half):
        if matching.defers[i]:
            samples, sizes, last = tables[i]
            for item in members_of(last, sizes, moved[i, matching.partner[i]]):
                llm[samples[item]] = 2 * i + 1
    return encoder, llm


@njit(cache=True)
def falling_order(load):  # type: ignore[no-untyped-def]
    """Indices by falling load; equal ones stay in order. By insertion, for few."""
    order = np.arange(len(load))
    for index in range(1, len(load)):
        place = index
        while place > 0 and load[order[place - 1]] < load[index]:
            order[place] = order[place - 1]
            place -= 1
        order[place] = index
    return order


@njit(cache=True)
def subset_sums(sizes, weights):  # type: ignore[no-untyped-def]
    """Subsets of integer sizes by their sum, for every total up to that of all.

    Returns:
        The last item of a subset with that total, -1 if there is none and -2 for the empty one (following ``total -
        sizes[last]`` names the others), and the sum of the subset's ``weights``.
    """
    limit = sizes.sum()
    last = np.full(limit + 1, -1)
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
def nearest_reachable(last, target):  # type: ignore[no-untyped-def]
    """The reachable total nearest to a target of at least 0 (the smaller of two equally near)."""
    low, high = min(target, len(last) - 1), target + 1
    # Nothing moved is always reachable.
    while last[low] == -1:
        low -= 1
    while high < len(last) and last[high] == -1:
        high += 1
    return high if high < len(last) and high - target < target - low else low


@njit(cache=True)
def members_of(last, sizes, total):  # type: ignore[no-untyped-def]
    """Items of the subset with the given reachable sum."""
    members = np.empty(len(sizes), np.int64)
    count = 0
    while total > 0:
        members[count] = last[total]
        total -= sizes[members[count]]
        count += 1
    return members[:count]
