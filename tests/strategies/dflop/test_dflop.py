"""DFLOP: its layouts, profiles, balance, correction, and the public code's walk."""

from __future__ import annotations

import signal
from dataclasses import replace
from itertools import product
from math import ceil, inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.interface import Strategy
from entrain_bench.balancing.lpt import longest_first, lpt_with_exchange, trivial_bound
from entrain_bench.balancing.planning import partition_layers, recompute_choices, stage_sums
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.schedules import OneForwardOneBackward
from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import IncompatibleError, OutOfMemoryError, UserError
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program.layout import Layout
from entrain_bench.simulate.executor import Simulator
from entrain_bench.specs.job import LayoutRequest
from entrain_bench.specs.layer import BF16_BYTES
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench_strategies.dflop import DflopAssigner, DflopPlanner
from entrain_bench_strategies.dflop.assigner import (
    BOTH_PASSES,
    DataShapes,
    ThroughputTable,
    attention_flops,
    balance,
    data_shapes,
    encoder_cost,
    highs,
    improve,
    llm_cost,
    solve,
)
from entrain_bench_strategies.dflop.planner import DflopDegrees, enumerate_degrees
from support.builders import (
    AV_MODEL,
    av_samples,
    placed,
    profile_of,
    random_samples,
    samples,
    tiny_cluster,
    tiny_job,
    tiny_model,
)

MODEL = tiny_model(encoder=4, llm=4)
SAMPLES = samples((100, [800]), (300, [400, 200]), (50, []), (900, [1600]))
WALKED = samples((100, [800]), (300, [400, 200]), (50, []), (900, [1600, 1600, 1600]))
TPS = (1, 2, 4)


def dflop(**knobs: Any) -> Strategy:
    return Strategy("dflop", DflopPlanner(profile_samples=64, **knobs), DflopAssigner(), OneForwardOneBackward())


def profile_for(shapes: SampleShapes = SAMPLES, ranks: int = 8, batch: int = 16, **request: int) -> Profile:
    job = tiny_job(MODEL, tiny_cluster(1, ranks), global_batch=batch, request=LayoutRequest(**request))
    return profile_of(job, shapes)


# Planner


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
@pytest.mark.parametrize("request_", [{}, {"tp": 2}, {"dp": 2}, {"pp": 3}, {"tp": 1, "dp": 1}])
def test_enumeration_is_complete(ranks: int, request_: dict[str, int]) -> None:
    job = tiny_job(MODEL, tiny_cluster(1, ranks), global_batch=12, request=LayoutRequest(**request_))
    tps = [t for t in (1, 2, 4) if ranks % t == 0]
    degrees = range(1, ranks + 1)
    expected = {
        (a, b, c, d, e, f)
        for a, b, c, d, e, f in product(tps, range(1, 7), degrees, tps, range(1, 7), degrees)
        if a * b * c + d * e * f == ranks
        and 12 % f == 0
        and d == request_.get("tp", d)
        and f == request_.get("dp", f)
        and b + e == request_.get("pp", b + e)
    }
    if not expected:
        with pytest.raises(UserError, match="layout"):
            enumerate_degrees(job)
        return
    found = [tuple(row) for row in enumerate_degrees(job).tolist()]
    assert len(found) == len(set(found))
    assert set(found) == expected


def unevenness(profile: Profile, module: ModuleSpec, tokens: int, tp: int, pp: int) -> float:
    """Slowest over mean stage."""
    measured = profile.layers.layer_s(module, np.array([tokens]), tp, 1)
    stages = stage_sums(measured, partition_layers(measured, pp))
    return float(stages.max() / stages.mean())


@pytest.mark.wide
@pytest.mark.parametrize("whole_layers", [False, True])
def test_the_first_plan_is_the_best_by_brute_force(whole_layers: bool) -> None:
    profile = profile_for()
    shapes = data_shapes(profile, SAMPLES)
    encoder, llm = MODEL.modules
    best = np.inf
    for e_tp, e_pp, e_dp, l_tp, l_pp, l_dp in enumerate_degrees(profile.job).tolist():
        encoder_table = encoder_cost(profile, encoder, shapes.item_tokens[0], e_tp)
        llm_table = llm_cost(profile, llm, l_tp)
        for i in range(1, 16 // l_dp + 1):
            b = max(1.0, shapes.items[0] * 16 / (i * e_dp))
            flops = float(encoder.forward_flops(np.array([shapes.item_tokens[0]]))[0])
            e_dur = BOTH_PASSES * flops * b / (float(encoder_table.table.at(b)) * e_tp * e_pp)
            count = 16 / (i * l_dp)
            one = np.array([shapes.sequence_tokens])
            l_dur = count * float(llm_table.seconds(one, count * shapes.sequence_tokens, l_pp)[0])
            if whole_layers:
                e_dur *= unevenness(profile, encoder, shapes.item_tokens[0], e_tp, e_pp)
                l_dur *= unevenness(profile, llm, shapes.sequence_tokens, l_tp, l_pp)
            best = min(best, (i + e_pp + l_pp - 1) * max(e_dur, l_dur))
    seconds, plan, recompute = next(DflopPlanner(whole_layers=whole_layers).rank(profile, shapes))
    assert seconds == pytest.approx(best)
    assert recompute == (False, False)
    assert plan.num_microbatches * plan.llm_dp <= 16


def test_a_plan_over_memory_by_the_papers_constraint_is_dropped() -> None:
    shapes = DataShapes((1.0,), (2000,), 1000, (1,), 1000)
    job = tiny_job(MODEL, tiny_cluster(1, 8), budget_bytes=8e6)
    profile = profile_of(job, SAMPLES)
    degrees = enumerate_degrees(job)
    planner = DflopPlanner()
    dropped = kept = 0
    blocks = zip(planner.totals(profile, shapes, degrees), planner.estimates(profile, shapes, degrees), strict=True)
    for (rows, i, totals), (same, _, estimates) in blocks:
        np.testing.assert_array_equal(rows, same)
        llm_pp = degrees[rows, 4][:, None]
        depth = degrees[rows, 1][:, None] + llm_pp
        for total, (encoder, llm) in zip(totals, recompute_choices(profile.job, MODEL.module_groups), strict=True):
            over = estimates.encoder_state + depth * estimates.encoder_act[int(encoder)] > job.planning_budget_bytes
            over |= estimates.llm_state + llm_pp * estimates.llm_act[int(llm)] > job.planning_budget_bytes
            over |= i * degrees[rows, 5][:, None] > job.global_batch
            np.testing.assert_array_equal(np.isinf(total), over)
            dropped, kept = dropped + int(over.sum()), kept + int((~over).sum())
    assert dropped > 0
    assert kept > 0
    with pytest.raises(OutOfMemoryError):
        dflop().plan(profile_of(tiny_job(MODEL, budget_bytes=1e4), SAMPLES))


@pytest.mark.wide
@pytest.mark.parametrize("number", [1, 3, 8])
def test_a_given_number_of_microbatches_is_planned_for(number: int) -> None:
    profile = profile_for(batch=16)
    shapes = data_shapes(profile, SAMPLES)
    ranked = [*DflopPlanner(num_microbatches=number).rank(profile, shapes)]
    assert {plan.num_microbatches for _, plan, _ in ranked} == {number}
    # Every replica has so many samples at least, and T is that of the free search for the same plan and number.
    assert max(plan.llm_dp for _, plan, _ in ranked) * number <= 16
    degrees = enumerate_degrees(profile.job)
    free = {}
    for rows, i, totals in DflopPlanner().totals(profile, shapes, degrees):
        for row, seconds in zip(rows, totals[0][:, i == number][:, 0], strict=True):
            free[*degrees[row].tolist()] = seconds
    for seconds, plan, recompute in ranked:
        if not any(recompute):
            theta = plan.encoder_tp, plan.encoder_pp, plan.encoder_dp, plan.llm_tp, plan.llm_pp, plan.llm_dp
            assert seconds == free[theta]
    assert dflop(num_microbatches=number).plan(profile).num_microbatches == number


def test_one_rank_carries_what_passes_between_groups_of_unequal_dp() -> None:
    profile, shapes = profile_for(), DataShapes((1.0,), (4,), 4, (1,), 4)
    found = {
        when: [
            DflopPlanner(communicator=when)
            .build(profile, shapes, 1.0, DflopDegrees(1, 1, encoder_dp, 1, 1, 2, 4), (False, False))
            .layout.single_rank_boundary
            for encoder_dp in (2, 6)
        ]
        for when in ("unequal_dp", "always", "never")
    }
    assert found == {"unequal_dp": [False, True], "always": [True, True], "never": [False, False]}


def test_what_dflop_cannot_do_is_said() -> None:
    with pytest.raises(IncompatibleError, match=r"^layout.cp=2: must be 1 or null"):
        enumerate_degrees(profile_for(cp=2).job)
    with pytest.raises(IncompatibleError, match="has no encoder"):
        enumerate_degrees(tiny_job(tiny_model(encoder=0)))
    with pytest.raises(UserError, match=r"layout\.dp=3"):
        enumerate_degrees(profile_for(dp=3).job)


# Assigner, scheduler, programs


def layout_of(encoder_dp: int, llm_dp: int, num_microbatches: int = 4) -> Layout:
    encoder, llm = MODEL.modules
    ranks = np.arange(encoder_dp + 2 * llm_dp)
    first, second = ranks[:encoder_dp].reshape(encoder_dp, 1, 1), ranks[encoder_dp:].reshape(llm_dp, 2, 1)
    return Layout((placed(encoder, first), placed(llm, second)), num_microbatches)


@pytest.mark.wide
@pytest.mark.parametrize(("encoder_dp", "llm_dp"), [(1, 1), (2, 2), (3, 2), (2, 3), (4, 1), (1, 4)])
def test_any_two_dps_run_and_place_every_sample_once(encoder_dp: int, llm_dp: int) -> None:
    shapes = random_samples(np.random.default_rng(1), 48)
    job = tiny_job(MODEL, tiny_cluster(2, 8), global_batch=48)
    profile, layout = profile_of(job, shapes), layout_of(encoder_dp, llm_dp)
    assignment = DflopAssigner().assign(shapes, layout, profile)
    encoder, llm = assignment.modules
    owner = shapes.item_sample
    np.testing.assert_array_equal(encoder.microbatch, llm.microbatch[owner])
    assert set(zip(llm.replica.tolist(), llm.microbatch.tolist(), strict=True)) == set(product(range(llm_dp), range(4)))
    if encoder_dp == llm_dp:
        np.testing.assert_array_equal(encoder.replica, llm.replica[owner])
    program = OneForwardOneBackward().schedule(shapes, layout, assignment, profile)
    timeline = Simulator(CostTruth(MODEL, job.cluster), job.memory_budget_bytes).execute(program)
    assert timeline is not None


def test_a_shuffle_runs_the_same_buckets_in_another_order() -> None:
    shapes = random_samples(np.random.default_rng(4), 64)
    profile, layout = profile_of(tiny_job(MODEL, global_batch=64), shapes), layout_of(2, 2, 8)

    def buckets(shuffle: int | None) -> list[list[int]]:
        llm = DflopAssigner(shuffle=shuffle).assign(shapes, layout, profile).modules[1]
        return [np.flatnonzero((llm.microbatch * 2 + llm.replica) == one).tolist() for one in range(16)]

    filled, first, again, other = buckets(None), buckets(1), buckets(1), buckets(2)
    assert sorted(filled) == sorted(first) == sorted(other)
    assert first == again
    assert filled != first != other


@pytest.mark.parametrize(("encoder_dp", "llm_dp"), [(2, 2), (3, 2), (1, 4)])
def test_an_even_split_gives_every_replica_as_many_items(encoder_dp: int, llm_dp: int) -> None:
    shapes = random_samples(np.random.default_rng(1), 48)
    layout = layout_of(encoder_dp, llm_dp)
    profile = profile_of(tiny_job(MODEL, tiny_cluster(2, 8), global_batch=48), shapes)
    encoder, llm = DflopAssigner(split="even").assign(shapes, layout, profile).modules
    assert encoder.microbatch.tolist() == llm.microbatch[shapes.item_sample].tolist()
    counts = np.zeros((4, encoder_dp), np.int64)
    np.add.at(counts, (encoder.microbatch, encoder.replica), 1)
    assert np.ptp(counts, axis=1).max() <= 1


def test_buckets_are_the_llms_whatever_the_encoders_dp() -> None:
    vision, audio, llm = AV_MODEL.modules
    encoders = np.arange(4).reshape(4, 1, 1)
    layout = Layout((placed(vision, encoders), placed(audio, encoders), placed(llm, [[[4]], [[5]]])), 3)
    shapes = av_samples(np.random.default_rng(0), 24)
    *own, buckets = DflopAssigner().assign(shapes, layout, profile_of(tiny_job(AV_MODEL), shapes)).modules
    assert {*zip(buckets.replica.tolist(), buckets.microbatch.tolist(), strict=True)} == {*product(range(2), range(3))}
    for module, labels in zip((vision, audio), own, strict=True):
        assert {*labels.replica.tolist()} == {*range(4)}
        owner = shapes.item_sample[module.units(shapes)]
        assert labels.microbatch.tolist() == buckets.microbatch[owner].tolist()


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 3))
def test_the_solver_finds_the_optimum_of_small_cases(seed: int, items: int, buckets: int) -> None:
    cost = np.random.default_rng(seed).integers(0, 20, (items, 2)).astype(np.float64)
    best = min(highs(cost, np.array(choice), buckets).max() for choice in product(range(buckets), repeat=items))
    assert highs(cost, balance(cost, buckets, 0.05), buckets).max() == pytest.approx(best)
    assert trivial_bound(cost, buckets) <= best


def plain_lpt(cost: FloatArray, num_buckets: int) -> list[int]:
    """The definition, every bucket looked at for every item."""
    load, bucket = np.zeros((num_buckets, 2)), [0] * len(cost)
    for item in np.argsort(-cost.max(axis=1), kind="stable").tolist():
        higher, sums = (load + cost[item]).max(axis=1), load.sum(axis=1)
        bucket[item] = min(range(num_buckets), key=lambda b: (higher[b], sums[b], b))
        load[bucket[item]] += cost[item]
    return bucket


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 200), st.integers(1, 70), st.sampled_from(["many", "few", "none"]))
def test_lpt_is_that_of_the_definition_ties_included(seed: int, items: int, buckets: int, ties: str) -> None:
    rng = np.random.default_rng(seed)
    cost = rng.integers(0, {"many": 3, "few": 50, "none": 2**40}[ties], (items, 2)).astype(np.float64)
    assert longest_first(cost, buckets).tolist() == plain_lpt(cost, buckets)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 30), st.integers(1, 6))
def test_exchange_ends_where_none_helps_the_fullest_bucket(seed: int, items: int, buckets: int) -> None:
    cost = np.random.default_rng(seed).pareto(1.5, (items, 2))
    start, found = longest_first(cost, buckets), lpt_with_exchange(cost, buckets)
    high = highs(cost, found, buckets).max()
    assert high <= highs(cost, start, buckets).max()
    assert len(np.unique(found)) == len(np.unique(start))
    if high <= trivial_bound(cost, buckets) * (1 + 1e-6):
        return
    full = np.maximum(*(np.bincount(found, weights=column, minlength=buckets) for column in cost.T)).argmax()
    for one, other in product(np.flatnonzero(found == full), range(buckets)):
        for two in (None, *np.flatnonzero(found == other)):
            changed = found.copy()
            changed[one] = other
            if two is not None:
                changed[two] = full
            both = np.isin(changed, [full, other])
            assert highs(cost[both], changed[both], buckets).max() >= high * (1 - 2e-6)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-4, 0.01]))
def test_the_solver_never_hurts_and_repeats_itself(seed: int, work: float) -> None:
    cost = np.random.default_rng(seed).pareto(1.5, (40, 2))
    start = longest_first(cost, 6)
    found = improve(cost, 6, start, work)
    assert highs(cost, found, 6).max() <= highs(cost, start, 6).max()
    np.testing.assert_array_equal(found, improve(cost, 6, start, work))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the signals a process catches are read from /proc")
def test_ctrl_c_reaches_python_after_the_solver() -> None:
    def caught() -> bool:
        lines = Path("/proc/self/status").read_text().splitlines()
        (mask,) = (int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))
        return bool(mask >> (signal.SIGINT - 1) & 1)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert caught()
        solve(np.array([[5.0, 1.0], [4.0, 2.0], [3.0, 3.0], [3.0, 1.0]]), 2, np.array([0, 0, 1, 1]), 1.0)
        assert caught()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_table_interpolates_and_extrapolates_linearly_within_limits() -> None:
    table = ThroughputTable(np.array([1.0, 2.0, 4.0]), np.array([10.0, 14.0, 16.0]))
    np.testing.assert_allclose(table.at(np.array([1.5, 3.0, 0.5, 5.0])), [12, 15, 8, 16])
    assert float(ThroughputTable(np.array([1.0, 2.0]), np.array([9.0, 8.0])).at(2.5)) == 7.5
    assert float(ThroughputTable(np.array([1.0, 2.0]), np.array([1.0, 9.0])).at(0.5)) == 0.5


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_tables_give_back_the_measured_times_at_their_points(tp: int) -> None:
    profiled = profile_for()
    encoder, llm = MODEL.modules
    cost = encoder_cost(profiled, encoder, 700, tp)
    flops = encoder.forward_flops(np.full(4, 700)).sum()
    measured = profiled.layers.layer_s(encoder, np.full(4, 700), tp, 1).sum()
    assert float(cost.seconds(flops, 4.0, 1)) == pytest.approx(measured)
    assert float(cost.seconds(flops, 4.0, 3)) == pytest.approx(measured / 3)
    whole = profiled.layers.layer_s(llm, np.array([2048]), tp, 1).sum()
    assert llm_cost(profiled, llm, tp).seconds(np.array([2048]), 2048.0, 1)[0] == pytest.approx(whole)


def test_attention_takes_what_one_sequence_takes_beyond_short_ones() -> None:
    profiled = profile_for()
    llm = MODEL.llm
    whole_s, cut_s = (profiled.layers.layer_s(llm, np.full(n, 4096 // n), 1, 1).sum() for n in (1, 32))
    # Sequences of 128 tokens have a 32nd of attention's FLOPs.
    flops = BOTH_PASSES * attention_flops(llm, np.array([4096]))[0]
    assert float(llm_cost(profiled, llm, 1).attention.at(4096.0)) == pytest.approx(
        flops / ((whole_s - cut_s) * 32 / 31)
    )


def test_attention_flops_do_not_depend_on_key_value_groups() -> None:
    grouped, full = tiny_model(num_kv_heads=2).llm, tiny_model(num_kv_heads=8).llm
    lengths = np.array([512, 1024])
    np.testing.assert_array_equal(attention_flops(grouped, lengths), attention_flops(full, lengths))
    np.testing.assert_allclose(attention_flops(grouped, lengths)[1], 2 * 2.0 * 128 * 1024**2)


def test_durations_add_times_not_throughputs() -> None:
    # Half of the FLOPs at 1 and half at 3 FLOP/s take 2/3 of the harmonic mean's time; an arithmetic mean says 1/2.
    profiled = profile_for()
    cost = llm_cost(profiled, MODEL.llm, 1)
    lengths = np.array([4096])
    attention = attention_flops(MODEL.llm, lengths)
    linear = MODEL.llm.forward_flops(lengths) - attention
    parts = attention / cost.attention.at(4096.0) + linear / cost.linear.at(4096.0)
    np.testing.assert_allclose(cost.seconds(lengths, 4096.0, 1), BOTH_PASSES * parts)


def limited_profile(budget: float, ranks: int, batch: int, request: LayoutRequest) -> Profile:
    cluster = tiny_cluster(1, ranks)
    device = replace(cluster.device, memory_bytes=int(budget))
    job = tiny_job(MODEL, replace(cluster, device=device), global_batch=batch, request=request)
    return profile_of(job, WALKED)


def memory(
    profile: Profile, module: ModuleSpec, tp: int, pp: int, dp: int, tokens: float, in_flight: int, again: bool
) -> float:
    """Bytes of a rank of the largest stage, with the buffer."""
    layers = ceil(len(module.layers) / pp) / len(module.layers)
    state = module.learning_parameters / tp * float(profile.memory.parameter_bytes(np.array([dp]))[0])
    state += module.frozen_parameters / tp * BF16_BYTES
    kept = sum(one.input_bytes_per_token if again else one.activation_bytes_per_token for one in module.layers) / tp
    # States are sharded over ranks, and so shrink with the stage's share of the layers.
    return 1.25 * layers * (state + in_flight * kept * tokens)


def walk(profile: Profile, shapes: DataShapes, again: bool) -> tuple[list[DflopDegrees], list[float]]:
    """The accepted plans in the order of their acceptance, and their T."""
    job = profile.job
    gpus, batch, limit = job.cluster.num_ranks, job.global_batch, job.cluster.device.memory_bytes
    encoder, llm = MODEL.modules
    items, tokens = shapes.items[0], shapes.item_tokens[0]
    flops = float(encoder.forward_flops(np.array([tokens]))[0])
    best_s, best_m, plans, times = inf, inf, list[DflopDegrees](), list[float]()
    tps = [tp for tp in TPS if gpus % tp == 0]
    v_pps, l_pps = (range(1, len(module.layers) + 1) for module in MODEL.modules)
    for v_gpus, v_tp, v_pp, l_tp, l_pp in product(range(1, gpus), tps, v_pps, tps, l_pps):
        v_dp, v_rest = divmod(v_gpus, v_tp * v_pp)
        l_dp, l_rest = divmod(gpus - v_gpus, l_tp * l_pp)
        if v_rest or l_rest or max(v_dp, l_dp) > batch:
            continue
        largest = shapes.most_items[0] * tokens * l_dp / v_dp
        if memory(profile, encoder, v_tp, v_pp, v_dp, largest, v_pp + l_pp, again) > limit:
            continue
        if memory(profile, llm, l_tp, l_pp, l_dp, shapes.most_sequence_tokens, l_pp, again) > limit:
            continue
        for m in range(1, batch // l_dp + 1):
            l_mbs, v_mbs = batch / (m * l_dp), batch / (m * v_dp)
            if l_mbs < 1 or v_mbs < 1:
                continue
            few = items * v_mbs <= shapes.most_items[0]
            if few and shapes.sequence_tokens * l_mbs <= shapes.most_sequence_tokens:
                break
        l_mbs, b = batch / (m * l_dp), max(1.0, items * batch / (m * v_dp))
        v_cost = encoder_cost(profile, encoder, tokens, v_tp)
        v_s = BOTH_PASSES * flops * b / (float(v_cost.table.at(b)) * v_tp * v_pp)
        one = np.array([shapes.sequence_tokens])
        packed = shapes.sequence_tokens * l_mbs
        l_s = l_mbs * float(llm_cost(profile, llm, l_tp).seconds(one, packed, l_pp)[0])
        total = (m + v_pp + l_pp - 1) * max(v_s, l_s) * (4 / 3 if again else 1)
        if total < 1.1 * best_s and m < best_m:
            best_s, best_m = total, m
            plans.append(DflopDegrees(v_tp, v_pp, v_dp, l_tp, l_pp, l_dp, m))
            times.append(total)
    return plans, times


@pytest.mark.wide
@pytest.mark.parametrize("budget", [1e12, 2e7, 1e7])
@pytest.mark.parametrize(("ranks", "batch"), [(8, 64), (6, 50), (8, 5)])
@pytest.mark.parametrize("asked", [None, ()])
def test_the_walk_accepts_what_the_loops_accept(
    budget: float, ranks: int, batch: int, asked: tuple[str, ...] | None
) -> None:
    profile = limited_profile(budget, ranks, batch, LayoutRequest(recompute=asked))
    shapes = data_shapes(profile, WALKED)
    plans, times = walk(profile, shapes, again=asked is None)
    planner = DflopPlanner(microbatches="released", whole_layers=False)
    ranked = list(planner.rank(profile, shapes))
    assert [plan for _, plan, _ in ranked[: len(plans)]] == plans[::-1]
    np.testing.assert_allclose([seconds for seconds, _, _ in ranked[: len(plans)]], times[::-1])
    assert {again for _, _, again in ranked} == ({(asked is None,) * 2} if ranked else set())
    rest = [seconds for seconds, _, _ in ranked[len(plans) :]]
    assert rest == sorted(rest)
    if budget > 1e9:
        assert plans
        # A given memory drops some plans, and changes nothing about the others.
        assert len(ranked) == len(enumerate_degrees(profile.job, any_dp=True))
