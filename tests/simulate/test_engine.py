"""The compiled executor against a slow reference on random programs, orders and deadlocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.base.errors import DeadlockError, OutOfMemoryError, UserError
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program import Pass, Program, Slots, build_program
from entrain_bench.program.assignment import Assignment, ModuleAssignment, group_chunks
from entrain_bench.program.layout import Layout
from entrain_bench.program.validate import check_program
from entrain_bench.simulate import Simulator, place_actions
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.shapes import shapes_from_lists
from support.builders import (
    FRAMEWORK,
    StuckError,
    as_ints,
    chain_layout,
    durations,
    find,
    no_delay,
    placed,
    reference_times,
    samples,
    tiny_cluster,
    uniform_batch,
)
from support.programs import (
    LAYOUTS,
    LLM,
    MODEL,
    TWO_ENCODERS,
    VISION,
    assert_cycle_is_real,
    handmade_layout,
    random_extension,
    random_program,
    random_times,
    swap_entries,
)


def assert_same_times(program: Program, duration: np.ndarray, delay: np.ndarray) -> None:
    expected = reference_times(program, duration, delay)
    actual = place_actions(program, duration, delay)
    for name, theirs, ours in zip(("start", "end", "wait"), expected, actual, strict=True):
        assert np.array_equal(theirs, ours), name


seeds = st.integers(0, 2**32 - 1).map(np.random.default_rng)


@pytest.mark.wide
@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=25, deadline=None)
@given(seeds)
def test_times_equal_the_reference_on_random_programs(name: str, rng: np.random.Generator) -> None:
    program = random_program(rng, handmade_layout(name))
    check_program(program)
    assert_same_times(program, *random_times(rng, program))


@pytest.mark.wide
@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=25, deadline=None)
@given(seeds, st.integers(1, 4))
def test_swapped_orders_run_in_both_or_deadlock_in_both(name: str, rng: np.random.Generator, swaps: int) -> None:
    program = swap_entries(rng, random_program(rng, handmade_layout(name)), swaps)
    check_program(program)
    duration, delay = random_times(rng, program)
    try:
        reference_times(program, duration, delay)
    except StuckError as stuck:
        with pytest.raises(DeadlockError) as error:
            place_actions(program, duration, delay)
        assert_cycle_is_real(program, str(error.value), stuck)
    else:
        assert_same_times(program, duration, delay)


def test_deadlock_names_the_two_ranks_that_wait_for_each_other() -> None:
    layout = chain_layout(MODEL, 1, 1, 2)
    shapes, assignment = uniform_batch(MODEL, 2)
    program = chain_program(MODEL, shapes, layout, assignment, stages_behind(layout))
    # The LLM wants microbatch 1 first, the encoder wants the gradient of 0 before it runs 1.
    order = program.lane_actions.copy()
    first, second = program.lane_offsets[1], program.lane_offsets[1] + 2
    order[[first, first + 1, second, second + 1]] = order[[second, second + 1, first, first + 1]]
    encoder = program.lane_actions[: program.lane_offsets[1]]
    order[: len(encoder)] = encoder[[0, 2, 1, 3, *range(4, len(encoder))]]
    swapped = replace(program, lane_actions=order)
    with pytest.raises(DeadlockError) as error:
        place_actions(swapped, np.ones(program.num_actions), no_delay(program))
    message = str(error.value)
    assert "rank 0 at backward of vision microbatch 0 on stage 0 of replica 0 needs backward of llm" in message
    assert (
        "rank 1 at forward of llm microbatch 1 on stage 0 of replica 0 needs forward of vision microbatch 1" in message
    )


def test_a_rank_that_blocks_itself_is_a_cycle_of_one() -> None:
    layout = chain_layout(MODEL, 1, 1, 1)
    shapes, assignment = uniform_batch(MODEL, 1)
    program = chain_program(MODEL, shapes, layout, assignment, stages_behind(layout))
    order = program.lane_actions.copy()
    first = program.lane_offsets[1]
    order[[first, first + 1]] = order[[first + 1, first]]
    with pytest.raises(DeadlockError, match=r"rank 1 at backward of llm .* needs forward of llm microbatch 0"):
        place_actions(replace(program, lane_actions=order), np.ones(program.num_actions), no_delay(program))


# Multi-lane actions by hand


def test_an_action_of_several_lanes_waits_for_the_last_and_holds_all() -> None:
    # Ranks 0 and 1 each encode one sample (3 s and 5 s), then both run the LLM (2 s), then encode backward (1 s, 4 s).
    layout = Layout((placed(VISION, [[[0]], [[1]]]), placed(LLM, [[[0, 1]]], tp=2)), 1)
    shapes = samples((10, [40]), (10, [40]))
    chunks = [
        group_chunks(VISION, shapes, ModuleAssignment(as_ints([0, 1]), as_ints([0, 0]))),
        group_chunks(LLM, shapes, ModuleAssignment(as_ints([0, 0]), as_ints([0, 0]))),
    ]
    slots = [Slots(np.zeros((n, 1), np.int64), np.ones((n, 1), np.int64)) for n in (2, 1)]
    program = build_program(MODEL, layout, shapes, chunks, slots)
    check_program(program)
    assert layout.num_lanes == 2
    forward, backward = find(program, "llm", Pass.FORWARD, 0, [0, 1]), find(program, "llm", Pass.BACKWARD, 0, [0, 1])
    assert program.num_lanes[forward] == 2
    seconds = {("vision", 0): (3.0, 5.0), ("vision", 1): (1.0, 4.0), ("llm", 0): (2.0,), ("llm", 1): (2.0,)}
    took = durations(program, lambda view: seconds[view.module, int(view.kind)][view.replica])
    start, end, _ = place_actions(program, took, no_delay(program))
    assert start[forward] == 5.0
    assert start[backward] == 7.0
    assert start[find(program, "vision", Pass.BACKWARD, 0, [0], replica=0)] == 9.0
    assert start[find(program, "vision", Pass.BACKWARD, 0, [1], replica=1)] == 9.0
    assert end.max() == 13.0


def test_steps_of_a_stage_wait_for_all_its_replicas() -> None:
    layout = chain_layout(MODEL, 1, 1, 1, dp=2)
    shapes, assignment = uniform_batch(MODEL, 1, dp=2)
    program = chain_program(MODEL, shapes, layout, assignment, stages_behind(layout))
    took = durations(program, lambda view: 1.0 if view.replica == 0 else 10.0)
    steps = np.isin(program.kind, [Pass.GRAD_SYNC, Pass.OPTIMIZER])
    took[steps] = 1.0
    start, end, _ = place_actions(program, took, no_delay(program))
    # Replica 1: encoder 0..10, LLM 10..30, encoder 30..40. Steps of the LLM start at 30, of the encoder at 40.
    assert sorted(start[steps & (program.module == 1)].tolist()) == [30.0, 31.0]
    assert sorted(start[steps & (program.module == 0)].tolist()) == [40.0, 41.0]
    assert end.max() == 42.0


def test_transfer_wait_counts_only_time_after_the_data_was_computed() -> None:
    layout = chain_layout(MODEL, 1, 1, 1)
    shapes, assignment = uniform_batch(MODEL, 1)
    program = chain_program(MODEL, shapes, layout, assignment, stages_behind(layout))
    took = durations(program, lambda _: 2.0)
    delay = np.where(program.dep_bytes > 0, 3.0, 0.0)
    start, _, wait = place_actions(program, took, delay)
    forward, back = find(program, "llm", Pass.FORWARD, 0, [0]), find(program, "vision", Pass.BACKWARD, 0, [0])
    assert (start[forward], wait[forward]) == (5.0, 3.0)
    assert (start[back], wait[back]) == (12.0, 3.0)
    assert wait.sum() == 6.0


def test_a_delayed_transfer_behind_other_work_costs_nothing() -> None:
    layout = chain_layout(MODEL, 1, 1, 2)
    shapes, assignment = uniform_batch(MODEL, 2)
    program = chain_program(MODEL, shapes, layout, assignment, stages_behind(layout))
    took = durations(program, lambda view: 1.0 if view.module == "vision" else 5.0)
    start, _, wait = place_actions(program, took, np.where(program.dep_bytes > 0, 2.0, 0.0))
    second = find(program, "llm", Pass.FORWARD, 0, [1])
    assert (start[second], wait[second]) == (13.0, 0.0)


# Two encoders


@settings(max_examples=20, deadline=None)
@given(seeds)
def test_two_encoders_with_their_own_dp_equal_the_reference(rng: np.random.Generator) -> None:
    vision, audio, llm = TWO_ENCODERS.modules
    layout = Layout(
        (placed(vision, [[[0, 1]]], tp=2), placed(audio, [[[0]], [[1]]]), placed(llm, [[[0], [1]], [[2], [3]]])), 2
    )
    kinds = [[("image", 8, 2)], [("audio", 6, 3)], [("image", 8, 2), ("audio", 6, 3), ("image", 4, 1)], []]
    rows = [(5, kinds[int(rng.integers(0, 4))]) for _ in range(6)]
    shapes = shapes_from_lists(["image", "audio"], rows)
    chunks = []
    for module, place in zip(TWO_ENCODERS.modules, layout.modules, strict=True):
        units = len(module.units(shapes))
        chunks.append(
            group_chunks(module, shapes, ModuleAssignment(rng.integers(0, place.dp, units), rng.integers(0, 3, units)))
        )
    zeros = [np.zeros((len(c), place.pp), np.int64) for c, place in zip(chunks, layout.modules, strict=True)]
    program = build_program(TWO_ENCODERS, layout, shapes, chunks, [Slots(z, z) for z in zeros])
    position = random_extension(rng, program)
    slots = [Slots(position[program.forward_actions(i)], position[program.backward_actions(i)]) for i in range(3)]
    program = build_program(TWO_ENCODERS, layout, shapes, chunks, slots)
    check_program(program)
    assert_same_times(program, *random_times(rng, program))


# The simulator around it


def simulated(budget_bytes: float, framework: FrameworkOptions = FRAMEWORK) -> tuple[Simulator, Program]:
    layout = chain_layout(MODEL, 1, 1, 3)
    shapes, assignment = uniform_batch(MODEL, 3)
    program = chain_program(MODEL, shapes, layout, assignment, stages_behind(layout))
    return Simulator(CostTruth(MODEL, tiny_cluster(), framework), budget_bytes), program


def test_simulator_times_equal_the_reference_under_the_cost_truth() -> None:
    # One replica on a chain, whose equal samples never share a link at a time: transfers are mere delays.
    framework = FrameworkOptions(overlap_grad_reduce=False, overlap_param_gather=False, p2p="overlapped")
    simulator, program = simulated(1e12, framework)
    timeline = simulator.execute(program)
    prices = simulator.truth.price(program)
    assert prices.transfers is not None
    took, delay = prices.duration_s.copy(), prices.delay_s.copy()
    travels = prices.transfers.last >= 0
    delay[travels] += prices.transfers.link_s[prices.transfers.last[travels]]
    took[program.kind == Pass.OPTIMIZER] = prices.steps.optimizer_s
    start, end, wait = reference_times(program, took, delay)
    # No optimizer steps before the slowest stage is through.
    steps, optimizers = program.kind > Pass.BACKWARD, program.kind == Pass.OPTIMIZER
    begin = np.array(end)[~steps].max()
    assert timeline.start_s[~steps] == pytest.approx(np.array(start)[~steps], rel=1e-12)
    assert timeline.end_s[~steps] == pytest.approx(np.array(end)[~steps], rel=1e-12)
    assert timeline.transfer_wait_s[~steps] == pytest.approx(np.array(wait)[~steps], rel=1e-9, abs=1e-15)
    assert timeline.start_s[optimizers] == pytest.approx([begin] * 2, rel=1e-12)
    assert timeline.end_s[optimizers] == pytest.approx(begin + prices.steps.optimizer_s, rel=1e-12)
    assert timeline.iteration_time_s == timeline.end_s.max()
    assert np.array_equal(timeline.peak_memory_bytes, simulator.truth.memory.peak_bytes(program))


def test_simulator_refuses_a_program_beyond_the_budget_and_names_rank_and_action() -> None:
    simulator, program = simulated(1e12)
    peak = simulator.truth.memory.peak_bytes(program)
    exact = replace(simulator, memory_budget_bytes=float(peak.max()))
    exact.execute(program)
    less = replace(simulator, memory_budget_bytes=float(peak.max()) - 1.0)
    rank = int(peak.argmax())
    with pytest.raises(OutOfMemoryError, match=rf"memory: rank {rank} needs .* at (forward|backward) of "):
        less.execute(program)


def test_what_a_backward_needs_while_it_runs_counts() -> None:
    # With recomputation a backward builds its activations again, on top of what the forward left.
    layout = chain_layout(MODEL, 1, 1, 1, recompute=True)
    shapes, assignment = uniform_batch(MODEL, 1)
    program = chain_program(MODEL, shapes, layout, assignment, stages_behind(layout))
    truth = CostTruth(MODEL, tiny_cluster())
    during, after = truth.memory.over_program(program)
    assert after.max() < during.max()
    with pytest.raises(OutOfMemoryError, match="at backward of "):
        Simulator(truth, float(during.max()) - 1.0).execute(program)
    assert Simulator(truth, float(during.max())).execute(program).peak_memory_bytes.max() == during.max()


def test_simulator_checks_the_program_before_it_times_it() -> None:
    simulator, program = simulated(1e12)
    order = program.lane_actions.copy()
    order[0] = order[1]
    with pytest.raises(UserError, match="listed on"):
        simulator.execute(replace(program, lane_actions=order))


def test_an_assignment_across_replicas_of_one_chain_runs_like_the_reference() -> None:
    # Items encoded on replica 0 feed the LLM of replica 1 and the other way round.
    layout = chain_layout(MODEL, 1, 2, 2, dp=2)
    shapes = samples(*[(10, [40])] * 4)
    assignment = Assignment(
        (
            ModuleAssignment(as_ints([0, 0, 1, 1]), as_ints([0, 1, 0, 1])),
            ModuleAssignment(as_ints([1, 1, 0, 0]), as_ints([0, 1, 0, 1])),
        )
    )
    program = chain_program(MODEL, shapes, layout, assignment, stages_behind(layout))
    check_program(program)
    assert_same_times(program, durations(program, lambda v: 1.0 + v.replica), np.where(program.dep_bytes > 0, 2.0, 0.0))
