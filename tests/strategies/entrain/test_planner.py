"""Algorithms 1 and 2 of Entrain against brute force on tiny models."""

from __future__ import annotations

import logging
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.planning import (
    allocate_gpus,
    allocate_stages,
    partition_layers,
    place_chain,
    stable_samples,
)
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.errors import OutOfMemoryError, UserError
from entrain_bench.costs.memory import Memory
from entrain_bench.program.layout import check_layout
from entrain_bench.specs.job import PLANNING_SHARE, Degrees, LayoutRequest
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench_strategies.entrain.assigner import EntrainAssigner
from entrain_bench_strategies.entrain.planner import EntrainPlanner, EntrainScheduler
from support.builders import GIB, plan_with, profile_of, random_samples, samples, tiny_cluster, tiny_job, tiny_model

MODEL = tiny_model(encoder=4, llm=4)
DEGREES = Degrees(tp=1, cp=1, pp=8, dp=1)
# Encoder work and LLM work of a sample: mostly one, mostly the other.
ENCODER_HEAVY, LLM_HEAVY = (10, [16000]), (16000, [64])


def profile_for(*rows: tuple[int, list[int]], seed: int = 0, global_batch: int = 32, **request: int) -> Profile:
    job = tiny_job(MODEL, tiny_cluster(1, 8), global_batch=global_batch, request=LayoutRequest(**request))
    return profile_of(job, samples(*rows), seed)


# Algorithm 1


def test_constant_samples_are_stable_at_once() -> None:
    assert stable_samples(profile_for((100, [1000])), DEGREES, 59, 16384)[0] == 1


@pytest.mark.parametrize("seed", range(3))
def test_a_mixture_whose_allocation_flips_needs_more_samples(seed: int) -> None:
    profile = profile_for(ENCODER_HEAVY, LLM_HEAVY, seed=seed)
    one, other = (allocate_stages(profile, samples(row), DEGREES) for row in (ENCODER_HEAVY, LLM_HEAVY))
    assert one != other, "single samples disagree, so one is not enough"
    assert stable_samples(profile, DEGREES, 59, 16384)[0] > 1


def test_the_stable_number_really_is_stable() -> None:
    profile = profile_for(ENCODER_HEAVY, LLM_HEAVY, (500, [2000]), seed=1)
    number, _ = stable_samples(profile, DEGREES, 59, 1 << 20)
    fresh = profile_for(ENCODER_HEAVY, LLM_HEAVY, (500, [2000]), seed=77)
    seen = [allocate_stages(fresh, fresh.samples.draw(number), DEGREES) for _ in range(200)]
    share = max(seen.count(allocation) for allocation in set(seen)) / len(seen)
    assert share >= 0.9
    halves = [allocate_stages(fresh, fresh.samples.draw(max(1, number // 8)), DEGREES) for _ in range(200)]
    assert len(set(halves)) > 1


@pytest.mark.parametrize(("global_batch", "warned"), [(2, True), (1024, False)])
def test_a_global_batch_below_the_stable_number_is_warned_about(
    global_batch: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rows = ((100, [4000]), (4000, [400]))
    profile = profile_for(*rows, global_batch=global_batch, tp=1, cp=1, dp=1, pp=8)
    with caplog.at_level(logging.WARNING):
        plan_with(EntrainPlanner(), profile)
    assert (f"global_batch={global_batch} is below the stable profiling batch" in caplog.text) is warned


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 10))
def test_allocation_is_proportional_to_the_estimated_work(seed: int, pp: int) -> None:
    shapes = random_samples(np.random.default_rng(seed), 5, longest=8000)
    profile = profile_of(tiny_job(MODEL), shapes)
    encoder, llm = (float(part.sum()) for part in profile.estimates.samples(shapes, 1, 1))
    stages = allocate_stages(profile, shapes, Degrees(1, 1, pp, 1))
    due = pp * encoder / (encoder + llm)
    assert sum(stages) == pp
    assert min(stages) >= 1
    most = [len(module.layers) for module in MODEL.modules]
    nearest = min(range(max(1, pp - most[1]), min(most[0], pp - 1) + 1), key=lambda count: abs(count - due))
    assert abs(stages[0] - due) == pytest.approx(abs(nearest - due))


@pytest.mark.wide
def test_algorithm_1_compares_gpus_where_stages_agree() -> None:
    # Samples whose encoder shares round to two counts of GPUs of one stage count: 6 and 7 of 16 are both 3 of 8 stages.
    degrees = Degrees(tp=2, cp=1, pp=8, dp=1)
    by_gpus: dict[int, tuple[int, list[int]]] = {}
    for text in range(64, 16000, 64):
        row = (text, [4000])
        gpus, _ = allocate_gpus(profile_for(row), samples(row), degrees)
        by_gpus.setdefault(gpus, row)
    profile = profile_for(by_gpus[6], by_gpus[7])
    assert {allocate_stages(profile, profile.samples.draw(1), degrees) for _ in range(20)} == {(3, 5)}
    assert stable_samples(profile_for(by_gpus[6]), degrees, 59, 1)[0] == 1
    assert stable_samples(profile, degrees, 59, 16384)[0] > 1


# Algorithm 2


def mean_layer_s(profile: Profile, shapes: SampleShapes, name: str, degrees: Degrees) -> list[float]:
    """Estimated forward of a microbatch in every layer, from the fit alone."""
    module = profile.job.model.module(name)
    lengths = module.lengths(shapes, module.units(shapes)).astype(float)
    fit = profile.layers.forward_fit(module, degrees.tp, degrees.cp)
    each = [sum(max(float(np.polyval(row, x)), 0.0) for x in lengths) / len(shapes) for row in fit]
    return [each[kind] * profile.job.microbatch_size for kind in module.layer_kind]


def best_by_brute_force(profile: Profile, shapes: SampleShapes, degrees: Degrees, stages: tuple[int, ...]) -> float:
    """Least T_iter of Algorithm 2 over every split of both modules' layers."""
    per_module = []
    for name, count in zip(("vision", "llm"), stages, strict=True):
        costs = mean_layer_s(profile, shapes, name, degrees)
        splits = []
        for cuts in combinations(range(1, len(costs)), count - 1):
            bounds = (0, *cuts, len(costs))
            splits.append([sum(costs[lo:hi]) for lo, hi in pairwise(bounds)])
        per_module.append(splits)
    num_microbatches = profile.job.num_microbatches(degrees.dp)
    return min(
        sum(encoder) + sum(llm) + (num_microbatches - 1) * max(encoder + llm)
        for encoder in per_module[0]
        for llm in per_module[1]
    )


@pytest.mark.wide
@pytest.mark.parametrize("rows", [[(100, [1000])], [(3000, [400])], [(10, [6000])], [(700, [100, 3000])]])
@pytest.mark.parametrize("asked", [{"tp": 1, "cp": 1, "dp": 1}, {"tp": 1, "cp": 1}, {"tp": 2}, {}])
def test_the_plan_is_the_best_of_every_split_and_topology(
    rows: list[tuple[int, list[int]]], asked: dict[str, int]
) -> None:
    # Constant samples, so every draw is the same and estimates are exact.
    profile = profile_for(*rows, **asked)
    shapes = samples(*rows)
    candidates = {}
    for degrees in profile.job.degrees():
        if degrees.pp < 2:
            continue
        stages = allocate_stages(profile, shapes, degrees)
        if stages[0] > 6 or stages[1] > 6:
            continue  # more stages than layers: no such layout
        candidates[degrees] = best_by_brute_force(profile, shapes, degrees, stages)
    layout = plan_with(EntrainPlanner(profile_samples=8), profile)
    vision, llm = layout.modules
    chosen = Degrees(llm.tp, llm.cp, vision.pp + llm.pp, llm.dp)
    assert candidates[chosen] == pytest.approx(min(candidates.values()), rel=1e-9)
    taus = []
    for place in (vision, llm):
        bounds = np.cumsum((0, *place.layers_per_stage))
        costs = mean_layer_s(profile, shapes, place.module, chosen)
        taus += [sum(costs[lo:hi]) for lo, hi in pairwise(bounds)]
    seconds = sum(taus) + (layout.num_microbatches - 1) * max(taus)
    assert seconds == pytest.approx(min(candidates.values()), rel=1e-9)
    assert [vision.recompute, llm.recompute] == [False, False]
    check_layout(layout, MODEL, profile.job.cluster)


def test_a_forced_split_is_taken_and_must_leave_the_llm_a_stage() -> None:
    profile = profile_for((100, [1000]), pp=8, tp=1)
    own = plan_with(EntrainPlanner(profile_samples=4), profile).modules[0].pp
    forced = 4 if own != 4 else 5
    forced_layout = plan_with(EntrainPlanner(profile_samples=4, encoder_stages=forced), profile)
    assert [module.pp for module in forced_layout.modules] == [forced, 8 - forced]
    with pytest.raises(UserError, match=r"encoder_stages=8: must be below layout.pp"):
        plan_with(EntrainPlanner(profile_samples=4, encoder_stages=8), profile)
    with pytest.raises(UserError, match="encoder_stages=0: must be null or at least 1"):
        EntrainPlanner(encoder_stages=0)


def test_an_allocation_beyond_the_layers_falls_back_to_the_nearest_feasible_one() -> None:
    # The digest: "rounded to the nearest feasible integers". 2 + 6 stages are feasible at pp = 8, 1 + 7 are not.
    layout = plan_with(EntrainPlanner(profile_samples=4), profile_for((3000, [400]), pp=8, tp=1))
    assert [module.pp for module in layout.modules] == [2, 6]


def test_one_rank_a_replica_is_refused_with_the_reason() -> None:
    # Encoder and LLM need a stage each; layers are not what is missing.
    with pytest.raises(UserError) as error:
        plan_with(EntrainPlanner(profile_samples=4), profile_for((100, [100]), pp=1))
    assert "too few layers" not in str(error.value)


# Memory


def plan_with_budget(budget_bytes: float) -> tuple[bool, ...]:
    """Which modules recompute in the plan for a memory budget."""
    request = LayoutRequest(tp=1, cp=1, pp=4, dp=2)
    job = tiny_job(MODEL, tiny_cluster(1, 8), request=request, budget_bytes=budget_bytes)
    layout = plan_with(EntrainPlanner(profile_samples=4), profile_of(job, samples((8000, [8000]))))
    return tuple(module.recompute for module in layout.modules)


@pytest.mark.wide
def test_memory_pressure_turns_on_recomputation_and_then_fails_saying_what_is_missing() -> None:
    outcomes = []
    too_little = 0.0
    for budget in 8.0 * GIB * 0.8 ** np.arange(40):
        try:
            outcomes.append(plan_with_budget(float(budget)))
        except OutOfMemoryError:
            too_little = float(budget)
            break
    assert outcomes[0] == (False, False)
    # Once on, recomputation stays on as the budget shrinks.
    counts = [sum(outcome) for outcome in outcomes]
    assert counts == sorted(counts)
    assert counts[-1] > 0
    with pytest.raises(OutOfMemoryError, match=r"recompute.* GiB more than planners may use of the budget"):
        plan_with_budget(too_little)


@pytest.mark.wide
@pytest.mark.parametrize("row", [(4000, [8000]), (1500, [16000])])
def test_under_any_budget_the_plan_is_the_fastest_candidate_that_fits(row: tuple[int, list[int]]) -> None:
    candidates = []
    roomy = profile_for(row, tp=1, cp=1)
    batch = roomy.samples.draw(roomy.job.global_batch)
    for degrees in [d for d in roomy.job.degrees() if d.pp > 1]:
        stages = allocate_stages(roomy, samples(row), degrees)
        costs = [np.array(mean_layer_s(roomy, samples(row), name, degrees)) for name in ("vision", "llm")]
        for recompute in product([False, True], repeat=2):
            layers = [partition_layers(cost, count) for cost, count in zip(costs, stages, strict=True)]
            layout = place_chain(roomy.job, degrees, layers, recompute, leading=True)
            chain: list[float] = []
            for cost, split, again in zip(costs, layers, recompute, strict=True):
                bounds = np.cumsum((0, *split))
                # A backward takes two forwards; recomputation adds a third.
                chain += [cost[lo:hi].sum() * (4 / 3 if again else 1.0) for lo, hi in pairwise(bounds)]
            seconds = sum(chain) + (layout.num_microbatches - 1) * max(chain)
            assignment = EntrainAssigner().assign(batch, layout, roomy)
            program = EntrainScheduler(eager="none").schedule(batch, layout, assignment, roomy)
            need = float(Memory(MODEL).peak_bytes(program).max())
            candidates.append((seconds, need, layout.describe()))
    chosen = set()
    for budget in sorted({1.001 * need / PLANNING_SHARE for _, need, _ in candidates}):
        job = tiny_job(MODEL, request=LayoutRequest(tp=1, cp=1), budget_bytes=budget)
        plan = plan_with(EntrainPlanner(profile_samples=4), profile_of(job, samples(row))).describe()
        fastest = min((c for c in candidates if c[1] <= PLANNING_SHARE * budget), key=lambda c: c[0])
        assert plan == fastest[2], f"budget {budget / GIB:.3f} GiB"
        chosen.add(str(plan))
    assert len(chosen) > 2


def test_every_planned_layout_fits_the_batches_it_was_checked_with() -> None:
    rng = np.random.default_rng(3)
    shapes = random_samples(rng, 64, longest=4000)
    job = tiny_job(MODEL, tiny_cluster(1, 8), request=LayoutRequest(pp=4), budget_bytes=0.7 * GIB)
    profile = profile_of(job, shapes)
    layout = plan_with(EntrainPlanner(profile_samples=32), profile)
    memory = Memory(MODEL, job.framework)
    batch = profile.samples.draw(job.global_batch)
    assignment = EntrainAssigner().assign(batch, layout, profile)
    program = EntrainScheduler(eager="none").schedule(batch, layout, assignment, profile)
    # A fresh batch may exceed the margin but hardly the budget.
    assert memory.peak_bytes(program).max() <= job.memory_budget_bytes
    assert memory.lane_state_bytes(layout).max() <= PLANNING_SHARE * job.memory_budget_bytes
