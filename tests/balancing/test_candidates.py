"""Which candidates fit memory, and which is the fastest."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from entrain_bench.balancing.candidates import (
    MEMORY_BATCHES,
    Candidate,
    by_estimate,
    check_memory,
    fastest_in_trials,
    heaviest,
    listed_once,
)
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.base.errors import OutOfMemoryError, UserError
from entrain_bench.costs.memory import Memory
from entrain_bench.program import Program
from entrain_bench.program.assignment import same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.specs.job import PLANNING_SHARE, Job
from entrain_bench.specs.shapes import SampleShapes
from support.builders import GIB, PlainPrograms, chain_layout, profile_of, samples, tiny_job, tiny_model

MODEL = tiny_model(encoder=2, llm=4)


@PlainPrograms
def one_sample_a_microbatch(shapes: SampleShapes, layout: Layout) -> Program:
    dp = layout.modules[-1].dp
    microbatch = np.arange(len(shapes)) // dp
    assignment = same_microbatches(MODEL, shapes, np.arange(len(shapes)) % dp, microbatch, microbatch)
    return chain_program(MODEL, shapes, layout, assignment, stages_behind(layout))


def need(shapes: SampleShapes, layout: Layout) -> float:
    """Bytes of the neediest rank for eight times the first sample."""
    batch = shapes.take(np.zeros(8, np.int64))
    return float(Memory(MODEL).peak_bytes(one_sample_a_microbatch(batch, layout)).max())


def job_with(budget_bytes: float) -> Job:
    return tiny_job(MODEL, global_batch=8, microbatch_size=1, budget_bytes=budget_bytes)


def test_check_memory_accepts_exactly_what_fits_the_margin() -> None:
    shapes = samples((100, [400]))
    layout = chain_layout(MODEL, 1, 2, 8)
    needed = need(shapes, layout) / PLANNING_SHARE
    check_memory(profile_of(job_with(needed * 1.000001), shapes), layout, one_sample_a_microbatch)
    tight = profile_of(job_with(needed * 0.999), shapes)
    with pytest.raises(OutOfMemoryError, match="GiB more than planners may use of the budget"):
        check_memory(tight, layout, one_sample_a_microbatch)


def test_a_program_is_made_only_where_its_draft_does_not_fit() -> None:
    shapes = samples((100, [400]))
    thrifty, greedy = chain_layout(MODEL, 2, 3, 8), chain_layout(MODEL, 1, 1, 8)
    needs = [need(shapes, each) for each in (thrifty, greedy)]
    assert needs[0] < needs[1]

    class Drafting:
        chooses_recomputation = False

        def __init__(self, program: Layout, draft: Layout) -> None:
            self.program = program
            self.made = 0
            self.draft = PlainPrograms(lambda shapes, _: one_sample_a_microbatch(shapes, draft))

        def __call__(self, shapes: SampleShapes, _: Layout) -> Program:
            self.made += 1
            return one_sample_a_microbatch(shapes, self.program)

    profile = profile_of(job_with(sum(needs) / 2 / PLANNING_SHARE), shapes)
    fits, rescued, hopeless = Drafting(greedy, thrifty), Drafting(thrifty, greedy), Drafting(greedy, greedy)
    check_memory(profile, thrifty, fits)
    check_memory(profile, thrifty, rescued)
    # All batches are alike, so the first decides.
    assert (fits.made, rescued.made) == (0, 1)
    with pytest.raises(OutOfMemoryError):
        check_memory(profile, thrifty, hopeless)


def test_draws_go_on_after_the_first_batch_that_refuses_a_layout() -> None:
    shapes = samples(*((10 * length, [40]) for length in range(1, 9)))
    layout, seeds = chain_layout(MODEL, 1, 2, 8), range(8)
    for seed in seeds:
        peaks = []
        drawing = profile_of(job_with(1e15), shapes, seed=seed)
        for _ in range(MEMORY_BATCHES):
            program = one_sample_a_microbatch(drawing.samples.draw(8), layout)
            peaks.append(float(Memory(MODEL).peak_bytes(program).max()))
        first = next(index for index, peak in enumerate(peaks) if peak == max(peaks))
        checked = profile_of(job_with(max(peaks) / PLANNING_SHARE * 0.9999), shapes, seed=seed)
        with pytest.raises(OutOfMemoryError, match=f"a rank needs {max(peaks) / GIB:.1f} GiB"):
            check_memory(checked, layout, one_sample_a_microbatch)
        again = profile_of(job_with(1e15), shapes, seed=seed)
        for _ in range(first + 1):
            again.samples.draw(8)
        assert np.array_equal(checked.samples.draw(8).sample_ids, again.samples.draw(8).sample_ids)


def test_batches_decide_by_their_longest_unit_their_tokens_and_their_microbatches() -> None:
    job = tiny_job(MODEL, global_batch=4, microbatch_size=2)
    even = samples((100, []), (100, []), (100, []), (100, []))
    longest = samples((150, []), (10, []), (10, []), (10, []))
    neighbours = samples((140, []), (140, []), (1, []), (1, []))
    light = samples((90, []), (90, []), (90, []), (90, []))
    assert heaviest([light, even, longest, neighbours, even], job) == [0, 1, 2, 3]
    assert heaviest([longest, even, neighbours], job) == [0, 1, 2]
    assert heaviest([light, light], job) == [0]


def test_the_fastest_candidate_that_fits_wins() -> None:
    # So short that states decide: spread over more stages they are smaller.
    shapes = samples((10, [40]))
    deep, shallow = chain_layout(MODEL, 2, 3, 8), chain_layout(MODEL, 1, 1, 8)
    needs = [need(shapes, layout) for layout in (deep, shallow)]
    assert needs[0] < needs[1]
    roomy, tight = (profile_of(job_with(1.01 * bytes_ / PLANNING_SHARE), shapes) for bytes_ in needs[::-1])
    offered = [Candidate(3.0, deep), Candidate(2.0, shallow), Candidate(5.0, shallow)]
    assert fastest_in_trials(roomy, lambda _: by_estimate(offered), one_sample_a_microbatch, 1) is shallow
    assert fastest_in_trials(tight, lambda _: by_estimate(offered), one_sample_a_microbatch, 1) is deep
    with pytest.raises(OutOfMemoryError, match=r"layout vision tp1 cp1 pp1 .* a rank needs"):
        fastest_in_trials(tight, lambda _: by_estimate(offered[1:]), one_sample_a_microbatch, 1)


def test_the_best_trial_wins_over_the_best_estimate() -> None:
    profile = profile_of(job_with(16 * GIB), samples((10, [400])))
    layouts = [chain_layout(MODEL, 1, stages, 8) for stages in (1, 2)]
    batch = profile.samples.draw(8)
    slow, fast = sorted(layouts, key=lambda layout: -profile.trial_s(one_sample_a_microbatch(batch, layout)))
    offered = [Candidate(1.0, slow), Candidate(2.0, fast)]
    assert fastest_in_trials(profile, lambda _: offered, one_sample_a_microbatch, 1) is slow
    for trials in (2, 3):
        assert fastest_in_trials(profile, lambda _: offered, one_sample_a_microbatch, trials) is fast


def test_every_free_microbatch_size_gets_as_many_trials() -> None:
    # Estimates put all layouts for microbatches of one sample first; trials with two samples are taken all the same.
    free = replace(job_with(16 * GIB), free_microbatch_size=True, global_batch=8)
    profile = profile_of(free, samples((10, [400])))
    asked = {size: [chain_layout(MODEL, 1, stages, 8 // size) for stages in (1, 2, 3)] for size in (1, 2, 4, 8)}
    offered = {
        size: [Candidate(10.0 * size + number, layout) for number, layout in enumerate(layouts)]
        for size, layouts in asked.items()
    }
    made: list[Layout] = []

    @PlainPrograms
    def make_program(shapes: SampleShapes, layout: Layout) -> Program:
        made.append(layout)
        return one_sample_a_microbatch(shapes, layout)

    fastest_in_trials(profile, lambda each: offered[each.job.microbatch_size], make_program, 8)
    assert {id(layout) for layout in made} == {id(layout) for layouts in asked.values() for layout in layouts[:2]}
    made.clear()
    assert fastest_in_trials(profile, lambda each: offered[each.job.microbatch_size], make_program, 1) is asked[1][0]


@pytest.mark.parametrize("refuses", [False, True])
def test_where_memory_refuses_an_estimate_the_fastest_recomputation_is_found_by_trial(refuses: bool) -> None:
    shapes = samples((100, [400]))
    batch = shapes.take(np.zeros(8, np.int64))
    plain = chain_layout(MODEL, 1, 2, 8)
    vision, llm = plain.modules
    slow = Layout((replace(vision, recompute=True), replace(llm, recompute=True)), 8)
    fast = Layout((vision, replace(llm, recompute=True)), 8)
    needs = [need(shapes, each) for each in (plain, slow, fast)]
    assert needs[0] > max(needs[1:])
    budget = (max(needs[1:]) if refuses else needs[0]) / PLANNING_SHARE * 1.000001
    profile = profile_of(job_with(budget), shapes)
    times = [profile.trial_s(one_sample_a_microbatch(batch, each)) for each in (plain, slow, fast)]
    assert times[2] < times[1]
    # The estimates are wrong about the last two.
    offered = [Candidate(1.0, plain), Candidate(2.0, slow), Candidate(3.0, fast)]
    chosen = fastest_in_trials(profile, lambda _: by_estimate(offered), one_sample_a_microbatch, 1)
    assert chosen is (fast if refuses else plain)


def test_candidates_of_a_job_are_made_once_and_their_error_is_told_each_time() -> None:
    made = []

    def failing(profile: Profile) -> Iterator[Candidate]:
        for number in range(2):
            made.append((profile.job.microbatch_size, number))
            yield Candidate(float(number), chain_layout(MODEL, 1, 2, 8))
        raise UserError("no third")

    profile = profile_of(job_with(GIB), samples((100, [400])))
    other = profile.for_job(profile.job.with_microbatch_size(2))
    listed = listed_once(failing)
    first = next(listed(profile))
    assert next(listed(profile)) is first
    assert next(listed(other)).estimated_s == 0.0
    assert made == [(1, 0), (2, 0)]
    for _ in range(2):
        with pytest.raises(UserError, match="no third"):
            [*listed(profile)]
    assert made == [(1, 0), (2, 0), (1, 1), (1, 0), (1, 1)]
