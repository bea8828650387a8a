"""The tuner: against all fixed jobs by brute force, freedom that costs nothing, the same layout again, its budget."""

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest

from entrain_bench.balancing.candidates import Candidate, check_memory
from entrain_bench.balancing.fixed_jobs import by_turns, fixed_jobs
from entrain_bench.balancing.interface import MakeProgram, Strategy
from entrain_bench.balancing.interleaved import Interleaved
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.tuning import (
    FINALISTS,
    LAST,
    NUM_BATCHES,
    candidate_key,
    corrected_octaves,
    knob_values,
    tuned,
    tuning_batches,
)
from entrain_bench.base.arithmetic import log2
from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import compose
from entrain_bench.program.layout import Layout
from entrain_bench.run.experiment import prepare
from entrain_bench.specs.job import DEFAULT_DEGREES, DEFAULT_MICROBATCH_SIZE, Job, LayoutRequest
from entrain_bench_strategies.megatron import ArrivalOrder, MegatronPlanner
from support.builders import GIB, profile_of, random_samples, tiny_job, tiny_model
from support.tuner import all_layouts

MODEL = tiny_model(encoder=2, llm=4)
SHAPES = random_samples(np.random.default_rng(3), 400, longest=2000)
FREE = replace(tiny_job(MODEL, global_batch=64, microbatch_size=1), free_microbatch_size=True)
PLANNER = MegatronPlanner(profile_samples=16)
STRATEGY = Strategy("tiny", PLANNER, ArrivalOrder(), Interleaved())


def profile_for(job: Job, budget: int | None = 64, seed: int = 0) -> Profile:
    return replace(profile_of(job, SHAPES, seed), tuning_budget=budget)


def mean_s(layout: Layout, profile: Profile) -> float:
    """Mean of the batches of the last round."""
    batches = tuning_batches(profile)
    programs = MakeProgram(STRATEGY, profile)
    last = batches.last(int((profile.tuning_budget or 96) * LAST) // FINALISTS)
    return float(np.mean([profile.trial_s(programs(batches.drawn[index], layout)) for index in last]))


def requested(**values: int | None) -> Job:
    size = values.pop("size", None)
    job = replace(FREE, request=LayoutRequest(**values))
    return job if size is None else job.with_microbatch_size(size)


@pytest.mark.wide
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_hardly_any_fixed_job_is_faster_than_what_is_tuned(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = profile_for(FREE, 96, seed)
    found = mean_s(STRATEGY.plan(profile), profile)
    everything = all_layouts(partial(STRATEGY.plan, profile_for(FREE, 96, seed)), monkeypatch)[0]
    assert len(everything) > 300
    best = min(mean_s(layout, profile) for layout in everything)
    # The best of 700 on four batches is partly luck: at seed 2 it is 3% ahead, at the others nothing.
    assert found <= 1.04 * best
    # The planner's best estimate is no such thing.
    untried = replace(STRATEGY, planner=replace(PLANNER, num_trials=1))
    assert mean_s(untried.plan(profile_for(FREE, None, seed)), profile) > found


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.wide) for seed in (1, 2, 3))])
def test_a_free_knob_costs_nothing_on_the_tuning_batches(seed: int) -> None:
    fixed = requested(tp=DEFAULT_DEGREES.tp, cp=1, dp=DEFAULT_DEGREES.dp, size=DEFAULT_MICROBATCH_SIZE)
    least = mean_s(STRATEGY.plan(profile_for(fixed, 16, seed)), profile_for(fixed, 16, seed))
    for tp, dp, size in product((None, DEFAULT_DEGREES.tp), (None, DEFAULT_DEGREES.dp), (None, 4)):
        job = requested(tp=tp, dp=dp, size=size)
        profile = profile_for(job, 16, seed)
        assert mean_s(STRATEGY.plan(profile), profile) <= least * (1 + 1e-9)


def test_the_same_job_has_the_same_layout_whatever_else_was_drawn() -> None:
    first, again = profile_for(FREE), profile_for(FREE)
    drawn = again.samples.tuning_batches(2, again.job.global_batch)
    again.samples.draw(10)
    assert (
        again.samples.tuning_batches(2, again.job.global_batch)[1].sample_ids.tolist() == drawn[1].sample_ids.tolist()
    )
    assert candidate_key(STRATEGY.plan(first)) == candidate_key(STRATEGY.plan(profile_for(FREE)))


@pytest.mark.parametrize("budget", [16, 40, 96])
def test_every_simulated_batch_is_counted(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, plain = list[int](), Profile.trial_s

    def trial_s(self: Profile, program: object) -> float:
        counted.append(1)
        return plain(self, program)  # type: ignore[arg-type]

    monkeypatch.setattr(Profile, "trial_s", trial_s)
    STRATEGY.plan(profile_for(FREE, budget))
    assert budget / 2 < len(counted) <= 2 * budget
    counted.clear()
    fixed = requested(tp=1, cp=1, dp=4, size=1)
    STRATEGY.plan(profile_for(fixed, budget))
    assert 0 < len(counted) <= budget


@pytest.mark.wide
def test_what_is_tuned_fits_every_drawn_batch() -> None:
    """Under tight budgets some layouts fit the batch of the drafts, but not the heaviest."""
    chosen = set()
    for share in (1.0, 0.02, 0.01):
        profile = profile_for(replace(FREE, memory_budget_bytes=share * GIB))
        layout = STRATEGY.plan(profile)
        chosen.add(candidate_key(layout))
        check_memory(profile, layout, MakeProgram(STRATEGY, profile), tuning_batches(profile).drawn)
    assert len(chosen) > 1


def test_the_best_of_every_value_come_before_the_second_best() -> None:
    knobs = [("a", 1), ("a", 1), ("a", 2), ("b", 2), ("b", 3)]
    # Best of all, of "a" (the next), of 1 (none left), of 2, of "b", of 3.
    assert [*by_turns(np.arange(5.0), knobs)] == [0, 1, 2, 3, 4]
    near, far = 1.0 + np.arange(20) / 10, 99.0 + np.arange(10)
    estimated_s, knobs = np.concatenate([near, far]), [(0,)] * 20 + [(1,)] * 10
    assert [*by_turns(estimated_s, knobs)].index(20) < 4
    # The best of a value that cannot run do not cost it its turn.
    assert [*by_turns(estimated_s, knobs, lambda index: index not in range(20, 25))].index(25) < 4


def test_simulations_correct_estimates_of_the_same_values() -> None:
    """Estimates leave out a factor of 3 for one value; where one offer of it was simulated, the others are known."""
    knobs = [(first, second) for first in range(4) for second in range(5)]
    estimated_s = np.array([1.0 + second / 10 for _, second in knobs])
    true_s = [seconds * (3.0 if first == 0 else 1.0) for seconds, (first, _) in zip(estimated_s, knobs, strict=True)]
    given = log2(estimated_s), knob_values(knobs)
    some = [0, 6, 12, 18]
    expected = corrected_octaves(*given, some, [true_s[index] for index in some])
    assert expected[:5].min() > expected[5:].max()
    # Nothing is known of values that nothing was simulated with.
    assert np.diff(expected[[4, 9]])[0] < 0
    # The scale of the estimates does not matter.
    assert np.argsort(
        corrected_octaves(*given, some, [9 * true_s[index] for index in some]), kind="stable"
    ).tolist() == (np.argsort(expected, kind="stable").tolist())


def test_strata_are_by_the_longest_units_and_rounds_share_no_batch() -> None:
    profile = profile_for(FREE)
    batches = tuning_batches(profile)
    assert len(batches.drawn) == NUM_BATCHES
    assert sorted({*batches.drafts} | {*batches.others}) == list(range(NUM_BATCHES))
    assert len(batches.drafts) + len(batches.others) == NUM_BATCHES
    assert len({*batches.last(8)}) == 8
    assert len(batches.last(99)) == len(batches.others)
    longest = [
        sum(float(module.lengths(each, module.units(each)).max()) for module in MODEL.modules)
        for each in (batches.drawn[index] for index in batches.drafts)
    ]
    middle, low, high = longest
    assert low < middle < high


def test_every_value_is_among_the_fixed_jobs() -> None:
    profile = profile_for(FREE)
    jobs = fixed_jobs(profile, tuning_batches(profile).drawn[0])
    assert {job.microbatch_size for job in jobs} == {1, 2, 4, 8, 16}
    assert {1, 2, 4} <= {job.request.tp for job in jobs}
    assert len({(job.request.tp, job.request.cp, job.request.dp, job.microbatch_size) for job in jobs}) == len(jobs)


def test_fixed_jobs_are_rated_within_a_factor_of_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = profile_for(FREE)
    for factor, count in ((1.0, 1), (0.9, 0)):
        monkeypatch.setattr("entrain_bench.balancing.fixed_jobs.FAR", factor)
        assert len(fixed_jobs(profile, tuning_batches(profile).drawn[0])) == count


def test_where_nothing_fits_the_reason_is_told() -> None:
    with pytest.raises(UserError, match="more than planners may use"):
        STRATEGY.plan(profile_for(replace(FREE, memory_budget_bytes=1e5)))
    with pytest.raises(UserError, match="too few layers"):
        tuned(profile_for(FREE), [lambda _: []], MakeProgram(STRATEGY, profile_for(FREE)), 16)

    def refusing(sized: Profile) -> list[Candidate]:
        raise UserError(f"layout.tp={sized.job.request.tp} microbatch_size={sized.job.microbatch_size}: no stages")

    # The reason is that of the given job, not of degrees that the tuner chose.
    with pytest.raises(UserError, match=r"layout\.tp=None microbatch_size=1: no stages"):
        tuned(profile_for(FREE), [refusing], MakeProgram(STRATEGY, profile_for(FREE)), 16)


BUDGET = 96
FREE_KEYS = ("layout.tp=null", "layout.cp=null", "layout.dp=null", "microbatch_size=null")
# Layouts on one batch so many times as slow as the fastest are not simulated on the others.
HOPELESS = 1.5
# Batches that judge.
FRESH = 24
JOBS = [
    ("qwen25vl_llama3_1b", "chartqa", "a40x64", 2, 32),
    ("qwen25vl_llama3_1b", "opencqa_ocr", "a40x64", 4, 64),
    ("qwen25vl_llama3_1b", "coco", "a40x64", 4, 128),
    ("qwen25vl_llama3_1b", "mathvision", "a40x64", 4, 64),
    ("qwen25vl_llama3_1b", "synthchartnet_like", "a40x64", 4, 64),
    ("qwen25vl_llama3_3b", "chartqa", "a40x64", 4, 64),
    ("qwen25vl_llama3_3b", "coco", "a40x64", 2, 32),
    ("qwen25vl_llama3_3b", "opencqa_ocr", "a40x64", 2, 32),
    ("whisper_qwen25_7b", "librispeech", "a100x64", 2, 64),
    ("llavaov_llama3_8b", "dflop_mixed", "a100x32", 2, 32),
]


# Of 30 cases those that are further behind, and how far at most: twice the budget mends the first, not the second.
ENOUGH, SHORT = 1.02, {("qwen25vl_llama3_1b", "mathvision", 2): 1.07, ("qwen25vl_llama3_1b", "chartqa", 2): 1.05}


@pytest.mark.slow
@pytest.mark.parametrize("planning_seed", range(3))
@pytest.mark.parametrize("job", JOBS, ids=[f"{model}-{workload}" for model, workload, *_ in JOBS])
def test_megatron_is_within_2_percent_of_all_its_layouts(
    job: tuple[str, str, str, int, int], planning_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that fit memory, the fastest on the batches of the last round; both are judged on fresh batches.

    Two of 30 cases are further behind (``SHORT``).

    On the batches that chose it, the fastest of 2,000 layouts is partly luck.
    """
    model, workload, cluster, num_nodes, global_batch = job
    config = compose(
        *(f"strategy=megatron model={model} workload={workload} cluster={cluster}".split()),
        f"cluster.num_nodes={num_nodes}",
        f"global_batch={global_batch}",
        f"planning_seed={planning_seed}",
        f"tuning_budget={BUDGET}",
        *FREE_KEYS,
    )
    context = prepare(config)
    found = context.plan()
    layouts, trials = all_layouts(context.plan, monkeypatch)
    assert len(layouts) > 500
    last = trials.batches.last(int(BUDGET * LAST) // FINALISTS)
    first_s = [trials.seconds(layout, last[0]) for layout in layouts]
    near = [one for one, seconds in zip(layouts, first_s, strict=True) if seconds <= HOPELESS * min(first_s)]
    best = min(filter(trials.fits, near), key=lambda layout: trials.mean_s(layout, last))
    rng = np.random.default_rng([planning_seed, 1])
    fresh = [context.source.draw(global_batch, rng) for _ in range(FRESH)]
    programs = MakeProgram(context.strategy, context.planning)
    own_s, best_s = (
        sum(context.planning.trial_s(programs(batch, layout)) for batch in fresh) for layout in (found, best)
    )
    assert own_s <= SHORT.get((model, workload, planning_seed), ENOUGH) * best_s
