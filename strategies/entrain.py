"""Entrain (Jang and Chowdhury, arXiv:2605.27918): one static layout, then deferral of excess LLM work.

How many samples to profile and the layout (Algorithms 1 and 2), hierarchical microbatch assignment (Algorithm 3), its
deferral alone on others' microbatches, and 1F1B with split encoder backwards and eager forwards (section 5.3).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import ceil
from typing import ClassVar

import numpy as np

from entrain_bench.balancing.candidates import Candidate, Draft, rising_candidates
from entrain_bench.balancing.fixed_jobs import default_job
from entrain_bench.balancing.interface import Assigner, Drafter, MakeProgram, Observer
from entrain_bench.balancing.lpt import fill_groups
from entrain_bench.balancing.options import Eager
from entrain_bench.balancing.planning import (
    allocate_stages,
    partition_layers,
    place_chain,
    recompute_choices,
    recompute_factor,
    stable_samples,
    stage_sums,
)
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.schedules import OneForwardOneBackward
from entrain_bench.balancing.tuning import chosen_layout
from entrain_bench.base.arithmetic import log
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.compiled import njit
from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.base.hosttime import each_replica_alone
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment, same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.program.timeline import Timeline
from entrain_bench.specs.job import Degrees
from entrain_bench.specs.parse import Count
from entrain_bench.specs.shapes import SampleShapes

logger = logging.getLogger(__name__)

# Algorithm 1: alpha, the probability of accepting an unstable number; the tolerated rate of other allocations; the
# limit.
CONFIDENCE_ERROR = 0.05
ALLOCATION_ERROR = 0.05
MAX_SAMPLES = 16384
# Validation batches that must all agree (k of Algorithm 1).
NUM_VALIDATIONS = ceil(log(CONFIDENCE_ERROR) / log(1 - ALLOCATION_ERROR))
# Further than any path.
UNREACHED = np.iinfo(np.int64).max
# Resolution of the subset-sum program: the heaviest microbatch of a replica spans this many bins.
NUM_BINS = 512


@dataclass(frozen=True, slots=True)
class EntrainPlanner:
    """Searches homogeneous TP and CP, and the pipeline stages of encoder and LLM from the profiled workload ratio.

    Attributes:
        profile_samples: samples to profile; None runs Algorithm 1 for the smallest stable number.
        encoder_stages: stages of the encoder; None splits a replica's stages by the profiled workload ratio.
        num_trials: best estimates that fit memory and run a profiled batch on trial; the paper's planner runs none (1).
    """

    profile_samples: Count | None = None
    encoder_stages: Count | None = None
    num_trials: Count = 1

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:
        """The layout with the highest estimated throughput among those that fit memory (Algorithm 2)."""
        usable = [
            degrees
            for degrees in profile.job.degrees()
            if degrees.pp > (self.encoder_stages or 1) or not profile.job.model.encoders
        ]
        if not usable and self.encoder_stages:
            needed = "must be below layout.pp, because the LLM needs a stage"
            raise UserError(f"strategy.planner.encoder_stages={self.encoder_stages}: {needed}")
        if not usable:
            raise UserError("layout.pp=1: must be at least 2: one stage for the encoders and one for the LLM")
        if profile.tuning_budget is None:
            stable = {degrees: self._num_samples(profile, degrees) for degrees in usable}
            draw = profile.samples.draw
        else:
            # All fixed jobs share the samples that are stable for the first.
            default = default_job(profile.job)
            first = next((one for one in (default.degrees() if default else ()) if one in usable), usable[0])
            stable = dict.fromkeys(usable, self._num_samples(profile, first))
            draw = cache(profile.samples.draw)

        def candidates(sized: Profile) -> Iterator[Candidate]:
            return rising_candidates(self._drafts(sized, stable, draw))

        layout = chosen_layout(profile, candidates, make_program, self.num_trials)
        llm = layout.modules[-1]
        num_samples = next(n for d, n in stable.items() if (d.tp, d.cp, d.dp) == (llm.tp, llm.cp, llm.dp))
        if num_samples > profile.job.global_batch:
            logger.warning(
                "global_batch=%d is below the stable profiling batch of %d: some batches would want another layout",
                profile.job.global_batch,
                num_samples,
            )
        return layout

    def _num_samples(self, profile: Profile, degrees: Degrees) -> int:
        """Algorithm 1: the smallest doubling of the batch whose allocation 59 fresh batches repeat."""
        if self.profile_samples:
            return self.profile_samples
        num_samples, stable = stable_samples(profile, degrees, NUM_VALIDATIONS, MAX_SAMPLES)
        if not stable:
            logger.warning("allocation still varies at %d samples; planning with those", num_samples)
        return num_samples

    def _drafts(
        self, profile: Profile, stable: Mapping[Degrees, int], draw: Callable[[int], SampleShapes]
    ) -> Iterator[Draft]:

        def place(
            seconds: float, degrees: Degrees, layers: Sequence[tuple[int, ...]], recompute: Sequence[bool]
        ) -> Candidate:
            return Candidate(seconds, place_chain(profile.job, degrees, layers, recompute, leading=True))

        for degrees in profile.job.degrees():
            if degrees not in stable:
                continue
            samples = draw(stable[degrees])
            if self.encoder_stages is None or not profile.job.model.encoders:
                stages = allocate_stages(profile, samples, degrees)
            else:
                stages = self.encoder_stages, degrees.pp - self.encoder_stages
            for recompute in recompute_choices(profile.job):
                seconds, layers = _estimate(profile, samples, degrees, stages, recompute)
                yield Draft(seconds, partial(place, seconds, degrees, layers, recompute))


def _estimate(
    profile: Profile, samples: SampleShapes, degrees: Degrees, stages: tuple[int, ...], recompute: tuple[bool, ...]
) -> tuple[float, list[tuple[int, ...]]]:
    """Estimated iteration time of a topology, and each module's layers per stage (both tiers of Algorithm 2)."""
    job = profile.job
    layers = []
    latencies = []
    for module, again in zip(job.model.modules, recompute, strict=True):
        count = stages[0] if module.is_encoder else stages[-1]
        costs = _mean_layer_s(profile, samples, module.name, degrees) * job.microbatch_size * recompute_factor(again)
        # Two thirds of a layer's time are its backward's.
        costs = costs * np.array([(1.0 + 2.0 * layer.backward_share) / 3.0 for layer in module.layers])
        split = partition_layers(costs, count)
        layers.append(split)
        latencies.append(stage_sums(costs, split))
    encoder = np.sum(latencies[:-1], axis=0) if len(latencies) > 1 else np.zeros(0)
    chain = np.concatenate([encoder, latencies[-1]])
    # TP and CP are the same on both sides of the boundary, so nothing is resharded (P_reshard = 0).
    return float(chain.sum() + (job.num_microbatches(degrees.dp) - 1) * chain.max()), layers


def _mean_layer_s(profile: Profile, samples: SampleShapes, name: str, degrees: Degrees) -> FloatArray:
    """Estimated forward seconds a sample spends in each layer, on average ``[layers]``."""
    module = profile.job.model.module(name)
    lengths = module.lengths(samples, module.units(samples)).astype(np.float64)
    fit = profile.layers.forward_fit(module, degrees.tp, degrees.cp)
    per_kind = np.maximum(np.polynomial.polynomial.polyval(lengths, fit.T[::-1]), 0.0).sum(axis=-1) / len(samples)
    return np.asarray(per_kind[module.layer_kind])


@njit()
def bottleneck_matching(pair_s, alone_s):  # type: ignore[no-untyped-def]
    """Return the smallest T that no overloaded microbatch exceeds, alone or with a distinct partner (step e).

    A maximum matching decides each value of a binary search: bottlenecks V of deferring from overloaded i to
    underloaded j ``[n, n]``, and workloads of overloaded microbatches alone ``[n]``. Returns T, partners, and whether a
    pair moves work ``[n]``.
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
    # The largest candidate exceeds every stand-alone workload, so that all can be matched.
    partner, _ = _match(pair_s, alone_s, candidates[low])
    defers = partner >= 0
    free = np.ones(len(partner), np.bool_)
    for i in range(len(partner)):
        if defers[i]:
            free[partner[i]] = False
    others = np.flatnonzero(free)
    for place, alone in enumerate(np.flatnonzero(~defers)):
        partner[alone] = others[place]
    return candidates[low], partner, defers


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
    while True:
        level, shortest = _find_levels(allowed, column_of, row_of)
        if shortest == UNREACHED:
            return column_of
        for row in range(len(column_of)):
            if column_of[row] < 0:
                _augment(row, shortest, allowed, column_of, row_of, level)


@njit()
def _find_levels(allowed, column_of, row_of):  # type: ignore[no-untyped-def]
    """Steps of an alternating path from a free row to each row, and to a free column."""
    level = np.where(column_of < 0, 0, UNREACHED)
    for depth in range(len(column_of)):
        is_last = False
        for row in np.flatnonzero(level == depth):
            for column in np.flatnonzero(allowed[row]):
                if row_of[column] < 0:
                    is_last = True
                elif level[row_of[column]] == UNREACHED:
                    level[row_of[column]] = depth + 1
        if is_last:
            return level, depth + 1
    return level, UNREACHED


@njit()
def _augment(start, shortest, allowed, column_of, row_of, level):  # type: ignore[no-untyped-def]
    """Match one more row along a shortest alternating path from a free one, if rows not used yet leave one."""
    parent = np.full(len(column_of), -1)
    waiting = [start]
    while len(waiting) > 0:
        row = waiting.pop()
        for column in np.flatnonzero(allowed[row]):
            following = row_of[column]
            if following < 0 and level[row] + 1 == shortest:
                # The path's matched pairs change for the others, back from its end; its rows are used up.
                while row >= 0:
                    level[row] = UNREACHED
                    before = column_of[row]
                    column_of[row] = column
                    row_of[column] = row
                    column = before
                    row = parent[row]
                return
            if following >= 0 and level[following] == level[row] + 1:
                waiting.append(following)
                parent[following] = row


@njit()
def defer_pairwise(microbatch, llm_s, num_microbatches, num_bins):  # type: ignore[no-untyped-def]
    """Pair overloaded with underloaded microbatches and move LLM work to the partner (steps d to f).

    With an odd number the median microbatch stays unpaired and comes last. Returns encoder microbatch (the pairs
    interleaved: overloaded, then its partner) and LLM microbatch ``[samples]``.
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
    _, partner, defers = bottleneck_matching(pair_s, load[overloaded])
    place = np.full(num_microbatches, num_microbatches - 1)
    for i in range(half):
        place[overloaded[i]] = 2 * i
        place[underloaded[partner[i]]] = 2 * i + 1
    encoder = place[microbatch]
    llm = encoder.copy()
    for i in range(half):
        if defers[i]:
            samples, sizes, last = tables[i]
            for item in select_members(last, sizes, moved[i, partner[i]]):
                llm[samples[item]] = 2 * i + 1
    return encoder, llm


@njit()
def subset_sums(sizes, weights):  # type: ignore[no-untyped-def]
    """Return, for each total of a subset of sizes, its last item (-1: no subset, -2: empty) and its sum of weights."""
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
    """Return the reachable total nearest to a target of at least 0 (of two equally near ones the smaller)."""
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
    """Microbatch of each sample, in order: with the least encoder work so far, then the least LLM work."""
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
        encoder_s, llm_s = profile.estimates.samples(shapes, placed.tp, placed.cp, placed.expert_groups)
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
    """Steps d to f of Algorithm 3 on another assigner's microbatches; the order of pairs replaces its order.

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
        _, llm_s = profile.estimates.samples(shapes, placed.tp, placed.cp, placed.expert_groups)
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
        """Return this assigner with the state that the base has learned, if it learns."""
        return replace(self, base=self.base.observe(timeline, profile)) if isinstance(self.base, Observer) else self


@dataclass(frozen=True, slots=True)
class EntrainScheduler(OneForwardOneBackward):
    """1F1B in which deferred samples run backward with the LLM microbatch that took them.

    Encoder stages warm up with as many forwards as memory allows.

    Attributes:
        split_backward: whether an encoder microbatch's backward is cut; else it waits for its last deferred sample.
    """

    handles_generators: ClassVar[bool] = False
    eager: Eager = "encoder"
    split_backward: bool = True

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """The program; warm-up grows with free memory, one stage at least one forward ahead of the next."""
        return self.in_chain(shapes, layout, assignment, profile, self.split_backward)
