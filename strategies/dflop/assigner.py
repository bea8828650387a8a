"""DFLOP's profiling engine and online microbatch scheduler (arXiv:2603.25120): throughputs by shape, balanced buckets.

LPT with exchange, then the ILP by CP-SAT: minimize C_max, which bounds every bucket's encoder and LLM durations.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np
from ortools.sat.python import cp_model

from entrain_bench.balancing.chunk_groups import split_by_label
from entrain_bench.balancing.corrected import observed
from entrain_bench.balancing.estimates import Corrector, shape_classes
from entrain_bench.balancing.lpt import CLOSE, by_falling, deal, lpt_with_exchange, place_in_group, trivial_bound
from entrain_bench.balancing.options import Amount
from entrain_bench.balancing.planning import mean_length, recompute_factor
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.program.assignment import Assignment, ModuleAssignment
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.program.timeline import Timeline
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.parse import OneOf, at_least
from entrain_bench.specs.shapes import SampleShapes

# Grids of the released code (BDAI-Research/DFLOP, 60e86d8).
ENCODER_BATCHES = np.array([1, 2, 4, 8, 16, 32, 64])
LLM_TOKENS = np.array([1024, 2048, 4096, 8192])
# Length of the short sequences that leave of a microbatch nearly its linear part alone.
SHORT_TOKENS = 128
# FLOPs of a forward and a backward relative to the forward's.
BOTH_PASSES = 3.0
# Extrapolated throughputs are at least this share of the least measured one, and at most the greatest. With a higher
# line Algorithm 1 chooses microbatches of 60 samples, which never attain it.
LEAST = 0.5
# Costs in the integer program, in parts of the largest sum at the start.
RESOLUTION = 1_000_000
# Share of the work that one integer program over a part of the buckets may take.
PROGRAM_SHARE = 0.02
# Programs in a row that improve nothing before the search ends.
PATIENCE = 16
# The largest global batch that goes to the solver; larger ones keep the result of LPT with exchange. 131,072 samples of
# coco take 5.1 s with the solver and 0.46 s without (x86-64, 2026-11).
SOLVER_SAMPLES = 8192


@dataclass(frozen=True, slots=True)
class ThroughputTable:
    """Model FLOP/s of one GPU in both passes over a size, linear between and beyond points, within limits."""

    sizes: FloatArray
    flops_per_s: FloatArray

    def at(self, size: FloatArray | float) -> FloatArray:
        """Throughput at the given sizes, same shape."""
        wanted = np.asarray(size, np.float64)
        slope = np.diff(self.flops_per_s) / np.diff(self.sizes)
        beyond = np.minimum(wanted - self.sizes[0], 0.0) * slope[0]
        beyond = beyond + np.maximum(wanted - self.sizes[-1], 0.0) * slope[-1]
        value = np.interp(wanted, self.sizes, self.flops_per_s) + beyond
        return np.asarray(np.clip(value, LEAST * self.flops_per_s.min(), self.flops_per_s.max()))


@dataclass(frozen=True, slots=True)
class EncoderCost:
    """Cost estimate of an encoder at one TP and CP; its throughput depends on the effective batch, in average items."""

    table: ThroughputTable
    ranks: int

    def seconds(self, flops: FloatArray, batch: FloatArray | float, pp: IntArray | int) -> FloatArray:
        """Return seconds of both passes on one of ``pp`` stages for forward FLOPs, in a batch of average items."""
        return np.asarray(BOTH_PASSES * flops / (self.table.at(batch) * self.ranks * pp))


@dataclass(frozen=True, slots=True)
class LlmCost:
    """Cost estimate of the LLM at one TP and CP: attention by sequence, everything else by the packed length."""

    module: ModuleSpec
    attention: ThroughputTable
    linear: ThroughputTable
    ranks: int

    def seconds(self, lengths: IntArray, packed: FloatArray | float, pp: IntArray | int) -> FloatArray:
        """Both passes on one of ``pp`` stages for each sequence, in microbatches of ``packed`` tokens (broadcasts)."""
        attention = attention_flops(self.module, lengths)
        linear = self.module.forward_flops(lengths) - attention
        return np.asarray(
            BOTH_PASSES
            * (attention / self.attention.at(lengths.astype(np.float64)) + linear / self.linear.at(packed))
            / (self.ranks * pp)
        )


def encoder_cost(profile: Profile, module: ModuleSpec, item_tokens: int, tp: int, cp: int = 1) -> EncoderCost:
    """Measure an encoder on batches of items of the average length."""
    lengths = np.full(1, item_tokens)
    flops = BOTH_PASSES * float(module.forward_flops(lengths)[0])
    seconds = np.array(
        [profile.layers.layer_s(module, np.full(batch, item_tokens), tp, cp).sum() for batch in ENCODER_BATCHES]
    )
    thr = ENCODER_BATCHES * flops / (seconds * tp * cp)
    return EncoderCost(ThroughputTable(ENCODER_BATCHES.astype(np.float64), thr), tp * cp)


def llm_cost(profile: Profile, module: ModuleSpec, tp: int, cp: int = 1) -> LlmCost:
    """Measure the LLM on one sequence and on as many tokens cut into short ones.

    The difference of both times is attention's, except a share ``SHORT_TOKENS`` / tokens of it, and at most at the
    device's peak rate. The rest, communication included, is linear.
    """
    attention = np.zeros(len(LLM_TOKENS))
    linear = np.zeros(len(LLM_TOKENS))
    peak = profile.job.cluster.device.peak_bf16_flops
    for index, tokens in enumerate(LLM_TOKENS):
        one = np.array([tokens])
        full_s = float(profile.layers.layer_s(module, one, tp, cp).sum())
        short = np.full(tokens // SHORT_TOKENS, SHORT_TOKENS)
        cut_s = float(profile.layers.layer_s(module, short, tp, cp).sum())
        flops = BOTH_PASSES * float(attention_flops(module, one)[0])
        least_s = flops / (peak * tp * cp)
        attention_s = min(max((full_s - cut_s) / (1 - SHORT_TOKENS / tokens), least_s), full_s / 2 + least_s)
        rest = BOTH_PASSES * float(module.forward_flops(one)[0]) - flops
        attention[index] = flops / (attention_s * tp * cp)
        linear[index] = rest / (max(full_s - attention_s, rest / (peak * tp * cp)) * tp * cp)
    sizes = LLM_TOKENS.astype(np.float64)
    return LlmCost(module, ThroughputTable(sizes, attention), ThroughputTable(sizes, linear), tp * cp)


def attention_flops(module: ModuleSpec, lengths: IntArray) -> FloatArray:
    """Forward FLOPs of attention in the whole module, per sequence."""
    total = np.zeros(lengths.shape)
    for count, kind in zip(np.bincount(module.layer_kind), module.kinds, strict=True):
        if kind.attention:
            total += count * kind.attention.flops(lengths)
    return total


@dataclass(frozen=True, slots=True)
class DataShapes:
    """Means and maxima of the profiled samples: all that the optimizer knows of the data."""

    items: tuple[float, ...]  # of each encoder in a sample, on average ``[encoders]``
    item_tokens: tuple[int, ...]  # encoder tokens an item ``[encoders]``; 1 where there are no items
    sequence_tokens: int  # LLM tokens of a sample, on average
    most_items: tuple[int, ...]  # of each encoder in one sample ``[encoders]``
    most_sequence_tokens: int  # LLM tokens of the longest sample


def data_shapes(profile: Profile, shapes: SampleShapes) -> DataShapes:
    """The data profiler's averages and maxima."""
    items = []
    tokens = []
    most = []
    for module in profile.job.model.encoders:
        units = module.units(shapes)
        items.append(len(units) / len(shapes))
        tokens.append(mean_length(module.lengths(shapes, units)))
        most.append(int(np.bincount(shapes.item_sample[units], minlength=1).max()))
    longest = int(shapes.llm_tokens.max())
    return DataShapes(tuple(items), tuple(tokens), mean_length(shapes.llm_tokens), tuple(most), longest)


def balance(cost: FloatArray, num_buckets: int, work: float) -> IntArray:
    """Bucket of each item by its costs ``[items, 2]``: LPT with exchange, then CP-SAT for ``work``; 0: no solver."""
    start = lpt_with_exchange(cost, num_buckets)
    return improve(cost, num_buckets, start, work) if work else start


def improve(cost: FloatArray, num_buckets: int, start: IntArray, most_work: float) -> IntArray:
    """Lower C_max by integer programs over the fullest bucket and a few others, one more after every two misses."""
    bucket = start.copy()
    work = 0.0
    misses = 0
    bound = trivial_bound(cost, num_buckets) * (1 + CLOSE)
    high = highs(cost, bucket, num_buckets)
    members = split_by_label(bucket, num_buckets)
    rng = np.random.default_rng(0)
    while work < most_work and misses < PATIENCE:
        fullest = int(high.argmax())
        size = min(2 + misses // 2, num_buckets)
        if high[fullest] <= bound:
            break
        others = np.array([np.where(np.arange(num_buckets) == fullest, np.inf, high).argmin()])
        if misses:
            drawn = rng.choice(num_buckets - 1, size - 1, replace=False)
            others = drawn + (drawn >= fullest)
        group = np.sort(np.append(others, fullest))
        items = np.sort(np.concatenate([members[one] for one in group]))
        before = np.searchsorted(group, bucket[items])
        most = most_work - work if size == num_buckets else most_work * PROGRAM_SHARE
        after, spent = solve(cost[items], size, before, most)
        work += spent
        lower = highs(cost[items], after, size)
        if lower.max() < high[fullest] * (1 - CLOSE):
            bucket[items] = group[after]
            misses = 0
            high[group] = lower
            for place, one in enumerate(group):
                members[one] = items[after == place]
        elif size == num_buckets:
            break
        else:
            misses += 1
    return bucket


def solve(cost: FloatArray, num_buckets: int, start: IntArray, work: float) -> tuple[IntArray, float]:
    """The best assignment that CP-SAT finds from ``start``, and the deterministic time it took, ``work`` at most."""
    order = by_falling(cost)
    # The same partition with buckets numbered in the order in which they appear.
    _, first, label = np.unique(start[order], return_index=True, return_inverse=True)
    hint = np.argsort(np.argsort(first, kind="stable"), kind="stable")[label]
    weight = np.rint(cost[order] * (RESOLUTION / highs(cost, start, num_buckets).max()))
    most = int(highs(weight, hint, num_buckets).max())
    model = cp_model.CpModel()
    largest = model.new_int_var(int(np.ceil(trivial_bound(weight, num_buckets))), most, "C_max")
    model.add_hint(largest, most)
    rows = []
    for item in range(len(order)):
        row = [model.new_bool_var("") for _ in range(min(item + 1, num_buckets))]
        model.add_exactly_one(row)
        model.add_hint(row[hint[item]], True)
        rows.append(row)
    for bucket in range(min(num_buckets, len(order))):
        literals = [row[bucket] for row in rows[bucket:]]
        for weights in weight[bucket:].T.astype(np.int64).tolist():
            model.add(cp_model.LinearExpr.weighted_sum(literals, weights) <= largest)
    model.minimize(largest)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = work
    # Presolve would not tighten the program, nor its linear relaxation say more than the trivial bound.
    solver.parameters.cp_model_presolve = False
    solver.parameters.linearization_level = 0
    # CP-SAT's own handler would replace Python's: Ctrl-C could not clean up any more.
    solver.parameters.catch_sigint_signal = False
    best = start.copy()
    if solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        best[order] = [next(b for b, literal in enumerate(row) if solver.boolean_value(literal)) for row in rows]
    return best, float(solver.response_proto.deterministic_time)


def highs(cost: FloatArray, bucket: IntArray, num_buckets: int) -> FloatArray:
    """The larger of the two sums of every bucket ``[buckets]``; the largest is C_max."""
    return np.maximum(*(np.bincount(bucket, weights=column, minlength=num_buckets) for column in cost.T))


@dataclass(frozen=True, slots=True)
class DflopAssigner:
    """Packs samples into N_mb x L_dp buckets; a bucket is an LLM microbatch.

    Attributes:
        solver_work_per_sample: CP-SAT's deterministic time for each sample of the global batch; 0: no solver.
        correction: the adaptive correction and its learned state; None: off.
        balanced: whether buckets are balanced; otherwise they are of as many samples each, in order of arrival.
        shuffle: buckets run in an order drawn by this seed; None: in order of filling. The paper states none.
        split: how the items of L_dp buckets go to the encoder's replicas. ``stay``: with their bucket if E_dp = L_dp,
            else by LPT. ``even``: in order, as many to each, as in the public code.
    """

    solver_work_per_sample: Annotated[float, at_least(0)] = 2e-4
    correction: Corrector | None = field(default_factory=Corrector)
    balanced: bool = True
    shuffle: Amount | None = None
    split: Annotated[str, OneOf(("stay", "even"))] = "stay"

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Bucket b is microbatch b // L_dp of LLM replica b mod L_dp.

        Encoder microbatch i holds the items of the L_dp buckets with that index, dealt over its replicas by ``split``.
        """
        model = profile.job.model
        llm = layout.modules[-1]
        num_buckets = layout.num_microbatches * llm.dp
        cost = np.zeros((len(shapes), 2))
        item_s = []
        for index, (module, placed) in enumerate(zip(model.modules, layout.modules, strict=True)):
            seconds = unit_s(module, shapes, placed, layout.num_microbatches, profile)
            if self.correction:
                lengths = module.lengths(shapes, module.units(shapes))
                seconds = seconds * self.correction.penalties(shape_classes(lengths, index))
            if module.is_encoder:
                item_s.append(seconds)
                # A bucket's share of its encoder microbatch: E_dp replicas work on L_dp buckets.
                cost[:, 0] += shapes.sum_items(module.units(shapes), seconds) * (llm.dp / placed.dp)
            else:
                cost[:, 1] += seconds
        work = self.solver_work_per_sample * len(shapes) if len(shapes) <= SOLVER_SAMPLES else 0.0
        if self.balanced:
            bucket = balance(cost, num_buckets, work)
        else:
            bucket = np.arange(len(shapes)) * num_buckets // len(shapes)
        if self.shuffle is not None:
            bucket = np.random.default_rng(self.shuffle).permutation(num_buckets)[bucket]
        replica = bucket % llm.dp
        microbatch = bucket // llm.dp
        labels = []
        for module, placed, seconds in zip(model.encoders, layout.modules[:-1], item_s, strict=True):
            owner = shapes.item_sample[module.units(shapes)]
            mine = replica[owner]
            if self.split == "even":
                mine = split_evenly(microbatch[owner], mine, placed.dp)
            elif placed.dp != llm.dp:
                by_falling = np.argsort(-seconds, kind="stable")
                num_bins = np.full(layout.num_microbatches, placed.dp)
                mine = deal(by_falling, microbatch[owner], seconds, num_bins)
            labels.append(ModuleAssignment(mine, microbatch[owner]))
        return Assignment((*labels, ModuleAssignment(replica, microbatch)))

    def draft(self) -> DflopAssigner:
        """Without the solver: LPT with exchange needs about the same memory."""
        return replace(self, solver_work_per_sample=0.0)

    def observe(self, timeline: Timeline, profile: Profile) -> DflopAssigner:
        """Feed the correction the executed durations of an iteration's microbatches."""
        if not self.correction or not self.correction.active:
            return self
        program = timeline.program
        seen = []
        seconds = timeline.end_s - timeline.start_s
        for index, (module, placed) in enumerate(zip(program.model.modules, program.layout.modules, strict=True)):
            believed = unit_s(module, program.shapes, placed, program.layout.num_microbatches, profile)
            position = np.searchsorted(module.units(program.shapes), program.chunks[index].members)
            seen.append(observed(program, index, believed[position], seconds))
        return replace(self, correction=self.correction.learn(seen))


def split_evenly(group: IntArray, replica: IntArray, parts: int) -> IntArray:
    """Part of each item: every group, by replica and index, in parts of as many items, the first ones with one more."""
    order = np.lexsort((replica, group))
    place = np.empty(len(group), np.int64)
    place[order] = place_in_group(group[order])
    base, more = np.divmod(np.bincount(group)[group], parts)
    return np.asarray(np.maximum(place // (base + 1), (place - more) // np.maximum(base, 1)))


def unit_s(
    module: ModuleSpec, shapes: SampleShapes, placed: ModuleLayout, num_microbatches: int, profile: Profile
) -> FloatArray:
    """Return estimated seconds of both passes of each unit on one stage, in an average microbatch ``[units]``."""
    lengths = module.lengths(shapes, module.units(shapes))
    if not len(lengths):
        return np.zeros(0)
    groups = num_microbatches * placed.dp
    if module.is_encoder:
        encoder = encoder_cost(profile, module, mean_length(lengths), placed.tp, placed.cp)
        seconds = encoder.seconds(module.forward_flops(lengths), len(lengths) / groups, placed.pp)
    else:
        llm = llm_cost(profile, module, placed.tp, placed.cp)
        seconds = llm.seconds(lengths, float(lengths.sum()) / groups, placed.pp)
    return np.asarray(seconds * recompute_factor(placed.recompute) * profile.estimates.error_factor(module, shapes))
