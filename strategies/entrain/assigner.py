"""Entrain's hierarchical microbatch assignment (Algorithm 3), and its deferral alone on others' microbatches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from entrain_bench.balancing.interface import Assigner, Drafter, Observer
from entrain_bench.balancing.lpt import fill_groups
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arrays import BoolArray, FloatArray, IntArray
from entrain_bench.base.compiled import inlined, njit
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.base.hosttime import each_replica_alone
from entrain_bench.program.assignment import Assignment, same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.program.timeline import Timeline
from entrain_bench.specs.shapes import SampleShapes

# Further than any path.
UNREACHED = np.iinfo(np.int64).max
# Resolution of the subset-sum program: the heaviest microbatch of a replica spans this many bins.
NUM_BINS = 512


class Matching(NamedTuple):
    """Partners of overloaded microbatches."""

    bottleneck: float  # T*, the largest LLM workload that remains
    partner: IntArray  # underloaded microbatch of each overloaded one ``[overloaded]``
    defers: BoolArray  # whether that pair moves work ``[overloaded]``


@njit()
def bottleneck_matching(pair_s, alone_s):  # type: ignore[no-untyped-def]
    """Smallest T that every overloaded microbatch is below alone, or with a distinct partner (step e).

    Binary search over all values; a maximum bipartite matching decides each. Values are bottlenecks V of deferring from
    overloaded i to underloaded j ``[n, n]``, and workloads of overloaded microbatches alone ``[n]``.
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
    """Column of each row in a maximum matching of allowed pairs, -1 for rows left over (Hopcroft and Karp, 1973)."""
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
    spans ``num_bins`` in the subset-sum program. Returns encoder microbatch (the pairs interleaved: overloaded, then
    its partner) and LLM microbatch ``[samples]``.
    """
    load = np.zeros(num_microbatches)
    for sample in range(len(microbatch)):
        load[microbatch[sample]] += llm_s[sample]
    falling = np.argsort(-load, kind="mergesort")
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
def subset_sums(sizes, weights):  # type: ignore[no-untyped-def]
    """Subsets of integer sizes by their sum, for every total up to that of all.

    Returns the last item of a subset with that total, -1 if there is none and -2 for the empty one (following ``total -
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


@njit()
def assign_microbatches(order, encoder_s, llm_s, num_microbatches):  # type: ignore[no-untyped-def]
    """Microbatch of each sample: in the given order, the one with the least encoder work so far.

    Ties go to the least LLM work; samples without encoder work choose by LLM work alone.
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


@dataclass(frozen=True, slots=True)
class EntrainAssigner:
    """Balances encoder work between microbatches, then defers LLM work inside pairs of microbatches.

    Attributes:
        defer: whether LLM work is deferred (steps d to f); without, microbatches keep their samples.
    """

    defer: bool = True

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Replica, encoder microbatch and LLM microbatch of every sample, from estimated workloads."""
        placed = layout.modules[-1]
        encoder_s, llm_s = profile.estimates.samples(shapes, placed.tp, placed.cp)
        by_encoder = np.argsort(-encoder_s, kind="stable")
        # Step a: every replica receives equally many samples.
        replica = fill_groups(by_encoder, llm_s, np.zeros(placed.dp), False)
        # Samples of each replica in order of arrival; all have equally many.
        samples = np.argsort(replica, kind="stable").reshape(placed.dp, -1)
        encoder = np.empty(len(shapes), np.int64)
        llm = np.empty(len(shapes), np.int64)
        with each_replica_alone(placed.dp):
            own_encoder_s = encoder_s[samples]
            own_llm_s = llm_s[samples]
            order = stratified_order(own_encoder_s, own_llm_s)
            count = effective_microbatches(own_encoder_s, layout.num_microbatches)
            for r, mine in enumerate(samples):
                encoder[mine] = llm[mine] = assign_microbatches(order[r], own_encoder_s[r], own_llm_s[r], count[r])
                if self.defer:
                    encoder[mine], llm[mine] = defer_pairwise(encoder[mine], own_llm_s[r], count[r], NUM_BINS)
        return same_microbatches(profile.job.model, shapes, replica, encoder, llm)


def effective_microbatches(encoder_s: FloatArray, num_microbatches: int) -> IntArray:
    """K_eff = min(K, floor(sum / max)) of each replica's encoder work ``[replicas, samples]`` (step b); K if none."""
    heaviest = encoder_s.max(axis=1)
    most = min(num_microbatches, encoder_s.shape[1])
    # The quotient of equal workloads may fall just short of an integer.
    full = encoder_s.sum(axis=1) / np.where(heaviest > 0.0, heaviest, 1.0) + 1e-9
    return np.where(heaviest > 0.0, np.clip(full.astype(np.int64), 1, most), most)


def stratified_order(encoder_s: FloatArray, llm_s: FloatArray) -> IntArray:
    """Each replica's samples ``[replicas, samples]``: LLM work above the median first, then by falling encoder work."""
    fine = llm_s <= np.median(llm_s, axis=1, keepdims=True)
    return np.lexsort((-encoder_s, fine), axis=1)


@dataclass(frozen=True, slots=True)
class DeferringAssigner:
    """Steps d to f of Algorithm 3 on microbatches that another assigner made; pairs take the place of its order.

    Attributes:
        base: makes the microbatches.
    """

    base: Assigner

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Labels of every module's units; ``IncompatibleError`` if items of a sample are not in its own microbatch."""
        model = profile.job.model
        placed = layout.modules[-1]
        made = self.base.assign(shapes, layout, profile)
        llm = made.modules[model.llm_index]
        for module, labels in zip(model.modules, made.modules, strict=True):
            owner = module.owners(shapes, module.units(shapes))
            together = (labels.replica == llm.replica[owner]) & (labels.microbatch == llm.microbatch[owner])
            if not together.all():
                sample = shapes.name_of(owner[np.flatnonzero(~together)[0]])
                raise IncompatibleError(
                    f"strategy.assigner.base={type(self.base).__name__}: puts {module.name} items of sample {sample} "
                    "and the sample in different microbatches; deferral needs them in the same one"
                )
        _, llm_s = profile.estimates.samples(shapes, placed.tp, placed.cp)
        encoder = np.empty(len(shapes), np.int64)
        deferred = np.empty(len(shapes), np.int64)
        with each_replica_alone(placed.dp):
            for replica in range(placed.dp):
                mine: IntArray = np.flatnonzero(llm.replica == replica)
                places, microbatch = np.unique(llm.microbatch[mine], return_inverse=True)
                if len(places):
                    encoder[mine], deferred[mine] = defer_pairwise(microbatch, llm_s[mine], len(places), NUM_BINS)
        return same_microbatches(model, shapes, llm.replica, encoder, deferred)

    def draft(self) -> DeferringAssigner:
        """With a quick base, if it has one."""
        return replace(self, base=self.base.draft()) if isinstance(self.base, Drafter) else self

    def observe(self, timeline: Timeline, profile: Profile) -> DeferringAssigner:
        """With what the base learns, if it does."""
        return replace(self, base=self.base.observe(timeline, profile)) if isinstance(self.base, Observer) else self
