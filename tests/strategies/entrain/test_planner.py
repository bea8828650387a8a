"""Algorithms 1 and 2 of Entrain against brute force; eager warm-up and split backwards against a replay of memory."""

from __future__ import annotations

import logging
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.planning import (
    allocate_gpus,
    allocate_stages,
    partition_layers,
    place_chain,
    stable_samples,
)
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.schedules import (
    backward_microbatch,
    chain_chunks,
    chain_program,
    eager_warmup,
    held_tokens,
    stages_behind,
)
from entrain_bench.base.arrays import FloatArray, IntArray, sum_rows
from entrain_bench.base.errors import UserError
from entrain_bench.costs.memory import Memory
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment, same_microbatches
from entrain_bench.program.layout import Layout, check_layout
from entrain_bench.simulate import Simulator
from entrain_bench.specs.job import PLANNING_SHARE, Degrees, Job, LayoutRequest
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench_strategies.entrain import EntrainAssigner, EntrainPlanner, EntrainScheduler
from support.builders import (
    GIB,
    chain_layout,
    plan_with,
    profile_of,
    random_samples,
    samples,
    tiny_cluster,
    tiny_job,
    tiny_model,
)

MODEL = tiny_model(encoder=4, llm=4)
DEGREES = Degrees(tp=1, cp=1, pp=8, dp=1)
# Encoder work and LLM work of a sample: mostly one, mostly the other.
ENCODER_HEAVY, LLM_HEAVY = (10, [16000]), (16000, [64])
MEMORY = Memory(MODEL)


def profile_for(*rows: tuple[int, list[int]], seed: int = 0, global_batch: int = 32, **request: int) -> Profile:
    job = tiny_job(MODEL, tiny_cluster(1, 8), global_batch=global_batch, request=LayoutRequest(**request))
    return profile_of(job, samples(*rows), seed)


# Algorithm 1


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


def test_an_allocation_beyond_the_layers_falls_back_to_the_nearest_feasible_one() -> None:
    # The digest: "rounded to the nearest feasible integers". 2 + 6 stages are feasible at pp = 8, 1 + 7 are not.
    layout = plan_with(EntrainPlanner(profile_samples=4), profile_for((3000, [400]), pp=8, tp=1))
    assert [module.pp for module in layout.modules] == [2, 6]


# Memory


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


seeds = st.integers(0, 2**32 - 1)


def room_job(bytes_to_plan_with: float) -> Job:
    """A job whose planners may use so many bytes of a rank."""
    return tiny_job(MODEL, budget_bytes=bytes_to_plan_with / PLANNING_SHARE)


def random_deferral(rng: np.random.Generator, dp: int, count: int) -> tuple[SampleShapes, Assignment]:
    """Samples on random replicas; the LLM takes those of even encoder microbatches now or with the next."""
    shapes = random_samples(rng, dp * count * 2, longest=2000)
    replica = np.arange(len(shapes)) % dp
    encoder = rng.integers(0, count, len(shapes))
    deferred = (rng.random(len(shapes)) < 0.5) & (encoder % 2 == 0) & (encoder + 1 < count)
    return shapes, same_microbatches(MODEL, shapes, replica, encoder, encoder + deferred)


def chosen_warmup(
    profile: Profile, shapes: SampleShapes, layout: Layout, assignment: Assignment, split: bool, only_encoders: bool
) -> list[IntArray]:
    program = chain_program(MODEL, shapes, layout, assignment, stages_behind(layout), split)
    freed = backward_microbatch(MODEL, shapes, assignment, program.chunks)
    return eager_warmup(program, freed, profile, only_encoders)


def handed_bytes(
    shapes: SampleShapes, layout: Layout, assignment: Assignment, split: bool
) -> tuple[FloatArray, FloatArray]:
    """Most bytes of tensors between actions on every lane."""
    return MEMORY.handed_bytes(chain_program(MODEL, shapes, layout, assignment, stages_behind(layout), split))


def budget_between(
    rng: np.random.Generator, shapes: SampleShapes, layout: Layout, assignment: Assignment, split: bool
) -> float:
    """A budget that plain 1F1B meets on some lane and that does not hold all microbatches there at once."""
    plain = chain_program(MODEL, shapes, layout, assignment, stages_behind(layout), split)
    most = [np.full(m.pp, layout.num_microbatches) for m in layout.modules]
    full = chain_program(MODEL, shapes, layout, assignment, most, split)
    lane = int(rng.integers(0, layout.num_lanes))
    low, high = (float(MEMORY.peak_bytes(program)[lane]) for program in (plain, full))
    return low + float(rng.random()) * (high - low) + 1.0


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(1, 2), st.integers(1, 3), st.integers(1, 2), st.integers(1, 8), st.booleans(), st.booleans())
def test_the_chosen_warmup_fits_and_one_more_forward_does_not(
    seed: int, dp: int, encoder_stages: int, llm_stages: int, count: int, only_encoders: bool, split: bool
) -> None:
    rng = np.random.default_rng(seed)
    layout = chain_layout(MODEL, encoder_stages, llm_stages, count, dp)
    shapes, assignment = random_deferral(rng, dp, count)
    budget = budget_between(rng, shapes, layout, assignment, split)
    plain = chain_program(MODEL, shapes, layout, assignment, stages_behind(layout), split)
    profile = profile_of(room_job(budget), shapes)
    warmup = chosen_warmup(profile, shapes, layout, assignment, split, only_encoders)
    program = chain_program(MODEL, shapes, layout, assignment, warmup, split)
    peaks = MEMORY.peak_bytes(program)
    # Where plain 1F1B fits, so does the longer warm-up.
    fits_plainly = MEMORY.peak_bytes(plain) <= budget
    assert np.all(peaks[fits_plainly] <= budget * (1 + 1e-12))

    chain = np.concatenate(warmup)
    behind = np.concatenate(stages_behind(layout))
    assert np.all(chain >= behind)
    assert np.all(np.diff(chain) <= -1), "every stage is at least one forward ahead of the next"
    if only_encoders:
        assert np.array_equal(warmup[-1], stages_behind(layout)[-1])
    used = 1 + max(int(labels.microbatch.max(initial=0)) for labels in assignment.modules)
    ahead = used
    for position in range(encoder_stages if only_encoders else len(chain)):
        chosen = int(chain[position])
        most = max(int(behind[position]), min(used - 1, ahead))
        assert chosen <= most
        if chosen < most:
            event("memory stopped the warm-up")
            # Memory stopped it: with one forward more on this stage some replica exceeds the budget, or would in
            # another order, in which the largest action runs and hands on while most is held.
            longer = chain.copy()
            longer[position] = chosen + 1
            parts = [longer[:encoder_stages], longer[encoder_stages:]]
            other = chain_program(MODEL, shapes, layout, assignment, parts, split)
            lanes = position + np.arange(dp) * len(chain)
            given, moving = handed_bytes(shapes, layout, assignment, split)
            besides = moving[lanes].max() + (chosen + 2) * given[lanes].max() + MEMORY.action_bytes(other)[1].max()
            assert MEMORY.peak_bytes(other)[lanes].max() + besides > budget * (1 - 1e-12)
        ahead = chosen - 1


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(1, 3), st.integers(1, 8), st.booleans())
def test_held_tokens_equal_a_replay_of_the_lane(seed: int, dp: int, count: int, split: bool) -> None:
    rng = np.random.default_rng(seed)
    shapes, assignment = random_deferral(rng, dp, count)
    layout = chain_layout(MODEL, 1, 1, count, dp)
    chunks = chain_chunks(MODEL, shapes, layout, assignment, split)
    freed = backward_microbatch(MODEL, shapes, assignment, chunks)
    for index, (module, rows) in enumerate(zip(MODEL.modules, chunks, strict=True)):
        tokens = sum_rows(rows.offsets, module.lengths(shapes, rows.members))
        held = held_tokens(rows, tokens, dp, count, freed[index])
        for warmup in range(count):
            ahead = [np.array([warmup]), np.array([warmup])]
            program = chain_program(MODEL, shapes, layout, assignment, ahead, split)
            assert held[warmup] == pytest.approx(most_tokens(program, index)), f"warm-up {warmup}"


def most_tokens(program: Program, index: int) -> float:
    """Most tokens that any lane of a one-stage module holds at once."""
    module = program.model.modules[index]
    most = 0.0
    for lane in range(program.layout.num_lanes):
        held = 0.0
        for view in program.lane(lane):
            if view.module != module.name or not view.members:
                continue
            tokens = float(module.lengths(program.shapes, np.array(view.members)).sum())
            held += tokens if view.kind == 0 else -tokens
            most = max(most, held)
    return most


# Schedules of random assignments


@settings(max_examples=40, deadline=None)
@given(seeds, st.sampled_from(["none", "encoder", "all"]), st.booleans(), st.integers(1, 2), st.integers(1, 7))
def test_schedules_run_within_the_budget_that_1f1b_meets(
    seed: int, eager: str, split: bool, dp: int, count: int
) -> None:
    rng = np.random.default_rng(seed)
    layout = chain_layout(MODEL, 2, 1, count, dp)
    shapes, assignment = random_deferral(rng, dp, count)
    plain = chain_program(MODEL, shapes, layout, assignment, stages_behind(layout), split)
    budget = float(MEMORY.peak_bytes(plain).max()) * (1 + 0.5 * float(rng.random()))
    profile = profile_of(room_job(budget), shapes)
    program = EntrainScheduler(split_backward=split, eager=eager).schedule(shapes, layout, assignment, profile)
    Simulator(CostTruth(MODEL, tiny_cluster()), budget).execute(program)
