"""DFLOP: tables, Algorithm 1, assignments and programs, against hand-worked cases and brute force."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from entrain_bench.balancing.interface import Strategy
from entrain_bench.balancing.planning import partition_layers, recompute_choices, stage_sums
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.schedules import OneForwardOneBackward
from entrain_bench.base.errors import IncompatibleError, OutOfMemoryError, UserError
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program.layout import Layout
from entrain_bench.simulate.executor import Simulator
from entrain_bench.specs.job import LayoutRequest
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench_strategies.dflop import DflopAssigner, DflopPlanner
from entrain_bench_strategies.dflop.assigner import unit_s
from entrain_bench_strategies.dflop.planner import DflopDegrees, enumerate_degrees
from entrain_bench_strategies.dflop.profiling import (
    BOTH_PASSES,
    DataShapes,
    data_shapes,
    encoder_cost,
    llm_cost,
)
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
    with pytest.raises(UserError, match=r"strategy\.planner\.communicator"):
        DflopPlanner(communicator="sometimes")


def test_what_dflop_cannot_do_is_said() -> None:
    with pytest.raises(IncompatibleError, match=r"^layout.cp=2: must be 1 or null"):
        enumerate_degrees(profile_for(cp=2).job)
    with pytest.raises(IncompatibleError, match="has no encoder"):
        enumerate_degrees(tiny_job(tiny_model(encoder=0)))
    with pytest.raises(UserError, match=r"layout\.dp=3"):
        enumerate_degrees(profile_for(dp=3).job)
    with pytest.raises(UserError, match=r"strategy\.planner\.profile_samples"):
        DflopPlanner(profile_samples=0)
    with pytest.raises(UserError, match=r"strategy\.planner\.microbatches"):
        DflopPlanner(microbatches="theirs")
    with pytest.raises(UserError, match=r"strategy\.planner\.num_microbatches=0"):
        DflopPlanner(num_microbatches=0)
    with pytest.raises(
        UserError, match=r"num_microbatches=4: must be null with strategy\.planner\.microbatches=released"
    ):
        DflopPlanner(num_microbatches=4, microbatches="released")
    with pytest.raises(UserError, match=r"strategy\.assigner\.shuffle=-1"):
        DflopAssigner(shuffle=-1)
    with pytest.raises(UserError, match=r"strategy\.assigner\.split"):
        DflopAssigner(split="odd")
    with pytest.raises(UserError, match=r"strategy\.assigner\.solver_work_per_sample"):
        DflopAssigner(solver_work_per_sample=-1)


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


def test_balanced_buckets_beat_arrival_order() -> None:
    shapes = random_samples(np.random.default_rng(2), 64, longest=4000)
    profile = profile_of(tiny_job(MODEL, global_batch=64), shapes)
    layout = layout_of(2, 2, 8)
    bucket = DflopAssigner().assign(shapes, layout, profile).modules[1]
    number = bucket.microbatch * 2 + bucket.replica
    seconds = unit_s(MODEL.llm, shapes, layout.modules[1], 8, profile)
    load = np.bincount(number, weights=seconds)
    arrival = np.bincount(np.arange(64) // 4, weights=seconds)
    assert load.std() < 0.25 * arrival.std()


@pytest.mark.wide
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
