"""LLM work that moves to the partner of an overloaded microbatch, compiled (steps d to f of Algorithm 3)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from entrain_bench.base.arrays import BoolArray, IntArray
from entrain_bench.base.compiled import inlined, njit

# Further than any path.
UNREACHED = np.iinfo(np.int64).max


class Matching(NamedTuple):
    """Partners of overloaded microbatches.

    Attributes:
        bottleneck: T*, the largest LLM workload that remains.
        partner: underloaded microbatch of each overloaded one ``[overloaded]``.
        defers: whether that pair moves work ``[overloaded]``.
    """

    bottleneck: float
    partner: IntArray
    defers: BoolArray


@njit()
def bottleneck_matching(pair_s, alone_s):  # type: ignore[no-untyped-def]
    """Smallest T such that every overloaded microbatch is below T alone or matched to a distinct partner below T.

    Binary search over all values; a maximum bipartite matching decides each (step e). Values are bottlenecks V of
    deferring from overloaded i to underloaded j ``[n, n]``, and workloads of overloaded microbatches alone ``[n]``.
    """
    candidates = np.sort(np.concatenate((pair_s.ravel(), alone_s)))
    low = 0
    high = len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if _match(pair_s, alone_s, candidates[middle])[1]:
            high = middle
        else:
            low = middle + 1
    # The largest candidate is above every stand-alone workload, so that there are partners for one.
    partner, _ = _match(pair_s, alone_s, candidates[low])
    defers = partner >= 0
    free = np.ones(len(partner), np.bool_)
    for i in range(len(partner)):
        if defers[i]:
            free[partner[i]] = False
    others = np.flatnonzero(free)
    for place, alone in enumerate(np.flatnonzero(~defers)):
        partner[alone] = others[place]
    return Matching(candidates[low], partner, defers)


@njit()
def _match(pair_s, alone_s, limit):  # type: ignore[no-untyped-def]
    """Partners of the microbatches above the limit, -1 for the others; and whether all of them can be matched."""
    critical = np.flatnonzero(alone_s > limit)
    column = maximum_matching(pair_s[critical] <= limit)
    partner = np.full(len(alone_s), -1)
    for row, i in enumerate(critical):
        partner[i] = column[row]
    return partner, np.all(column >= 0)


@njit()
def maximum_matching(allowed):  # type: ignore[no-untyped-def]
    """Column of each row in a maximum matching of allowed pairs ``[rows, columns]``, -1 for rows left over.

    Hopcroft and Karp, SIAM J. Comput. 1973.
    """
    column_of = np.full(allowed.shape[0], -1)
    row_of = np.full(allowed.shape[1], -1)
    level, waiting, parent = np.empty((3, allowed.shape[0]), np.int64)
    while True:
        shortest = _find_levels(allowed, column_of, row_of, level, waiting)
        if shortest == UNREACHED:
            return column_of
        for row in range(len(column_of)):
            if column_of[row] < 0:
                _augment(row, shortest, allowed, column_of, row_of, level, waiting, parent)


@inlined
def _find_levels(allowed, column_of, row_of, level, queue):  # type: ignore[no-untyped-def]
    """Steps of an alternating path from a free row to each row, into ``level``; returns those to a free column."""
    head = 0
    tail = 0
    shortest = UNREACHED
    for row in range(len(column_of)):
        level[row] = UNREACHED
        if column_of[row] < 0:
            level[row] = 0
            queue[tail] = row
            tail += 1
    while head < tail:
        row = queue[head]
        head += 1
        if level[row] >= shortest:
            continue
        for column in range(len(row_of)):
            if not allowed[row, column]:
                continue
            following = row_of[column]
            if following < 0:
                shortest = level[row] + 1
            elif level[following] == UNREACHED:
                level[following] = level[row] + 1
                queue[tail] = following
                tail += 1
    return shortest


@inlined
def _augment(start, shortest, allowed, column_of, row_of, level, stack, parent):  # type: ignore[no-untyped-def]
    """Match one more row along a shortest alternating path from a free one, if rows not used yet leave one."""
    stack[0] = start
    height = 1
    while height > 0:
        height -= 1
        row = stack[height]
        for column in range(len(row_of)):
            if not allowed[row, column]:
                continue
            following = row_of[column]
            if following < 0 and level[row] + 1 == shortest:
                _flip(start, row, column, column_of, row_of, level, parent)
                return
            if following >= 0 and level[following] == level[row] + 1:
                stack[height] = following
                height += 1
                parent[following] = row


@inlined
def _flip(start, row, column, column_of, row_of, level, parent):  # type: ignore[no-untyped-def]
    """Exchange the matched pairs of a path for the others, back from its end; its rows are used up."""
    while True:
        level[row] = UNREACHED
        column_of[row], row_of[column], column = column, row, column_of[row]
        if row == start:
            return
        row = parent[row]


@njit()
def defer_pairwise(microbatch, llm_s, num_microbatches, num_bins):  # type: ignore[no-untyped-def]
    """Pair overloaded with underloaded microbatches and move LLM work to the partner (steps d to f).

    The heavier half is overloaded. With an odd number the median microbatch stays unpaired and comes last. The heaviest
    spans ``num_bins`` in the subset-sum program.

    Returns:
        Encoder microbatch (the pairs interleaved: overloaded, then its partner) and LLM microbatch ``[samples]``.
    """
    load = np.zeros(num_microbatches)
    for sample in range(len(microbatch)):
        load[microbatch[sample]] += llm_s[sample]
    falling = falling_order(load)
    half = num_microbatches // 2
    bin_s = load[falling[0]] / num_bins
    if half == 0 or bin_s <= 0.0:
        return microbatch, microbatch
    overloaded = falling[:half]
    underloaded = falling[num_microbatches - half :]
    moved = np.empty((half, half), np.int64)
    pair_s = np.empty((half, half))
    tables = []
    for i in range(half):
        samples = np.flatnonzero(microbatch == overloaded[i])
        sizes = np.rint(llm_s[samples] / bin_s).astype(np.int64)
        last, seconds = subset_sums(sizes, llm_s[samples])
        for j in range(half):
            over_s = load[overloaded[i]]
            under_s = load[underloaded[j]]
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
            for item in select_members(last, sizes, moved[i, matching.partner[i]]):
                llm[samples[item]] = 2 * i + 1
    return encoder, llm


@njit()
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


@njit()
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


@njit()
def nearest_reachable(last, target):  # type: ignore[no-untyped-def]
    """The reachable total nearest to a target of at least 0 (the smaller of two equally near)."""
    low = min(target, len(last) - 1)
    high = target + 1
    # Nothing moved is always reachable.
    while last[low] == -1:
        low -= 1
    while high < len(last) and last[high] == -1:
        high += 1
    return high if high < len(last) and high - target < target - low else low


@njit()
def select_members(last, sizes, total):  # type: ignore[no-untyped-def]
    """Items of the subset with the given reachable sum."""
    members = np.empty(len(sizes), np.int64)
    count = 0
    while total > 0:
        members[count] = last[total]
        total -= sizes[members[count]]
        count += 1
    return members[:count]
