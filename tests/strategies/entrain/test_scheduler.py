"""Entrain's schedule: eager warm-up against a replay of memory, and the order of split backwards."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

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
from entrain_bench.costs.memory import Memory
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment, same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.program.validate import check_program
from entrain_bench.simulate import Simulator, place_actions
from entrain_bench.specs.job import PLANNING_SHARE, Job
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench_strategies.entrain.planner import EntrainScheduler
from support.builders import (
    chain_layout,
    no_delay,
    passes,
    profile_of,
    random_samples,
    tiny_cluster,
    tiny_job,
    tiny_model,
    uniform_batch,
)

MODEL = tiny_model(encoder=4, llm=4)
MEMORY = Memory(MODEL)
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


@pytest.mark.wide
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


# By hand


def roomy_schedule(eager: str, split: bool = True) -> tuple[Program, Profile]:
    layout = chain_layout(MODEL, 2, 2, 8)
    shapes, assignment = uniform_batch(MODEL, 8)
    profile = profile_of(room_job(1e15), shapes)
    return EntrainScheduler(split_backward=split, eager=eager).schedule(shapes, layout, assignment, profile), profile


@pytest.mark.parametrize(
    ("eager", "expected"), [("none", [3, 2, 1, 0]), ("encoder", [7, 6, 1, 0]), ("all", [7, 6, 5, 4])]
)
def test_eager_settings_choose_which_stages_warm_up_longer(eager: str, expected: list[int]) -> None:
    program, _ = roomy_schedule(eager)
    check_program(program)
    leading = []
    for lane in range(4):
        order = passes(program, lane)
        first_backward = next(index for index, text in enumerate(order) if " B" in text)
        leading.append(first_backward)
    # Forwards before the first backward: the warm-up and one.
    assert leading == [warmup + 1 for warmup in expected]
    place_actions(program, np.ones(program.num_actions), no_delay(program))


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
