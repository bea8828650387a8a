"""The compiled executor against a slow reference: random programs, orders, deadlocks, actions that begin together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.base.errors import DeadlockError, OutOfMemoryError
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program import Pass, Program
from entrain_bench.program.layout import Layout
from entrain_bench.program.validate import check_program
from entrain_bench.simulate import Simulator, place_actions
from entrain_bench.specs.framework import FrameworkOptions
from support.builders import (
    FRAMEWORK,
    StuckError,
    chain_layout,
    durations,
    find,
    no_delay,
    placed,
    reference_times,
    rngs,
    tiny_cluster,
    tiny_model,
    uniform_batch,
)
from support.programs import (
    LAYOUTS,
    MODEL,
    assert_cycle_is_real,
    handmade_layout,
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


# Multi-lane actions by hand


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


# Two encoders


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


LLM_ALONE = tiny_model(encoder=0)


def two_lanes() -> Program:
    layout = Layout((placed(LLM_ALONE.llm, [[[0]], [[1]]]),), 2)
    shapes, assignment = uniform_batch(LLM_ALONE, 2, dp=2)
    return chain_program(LLM_ALONE, shapes, layout, assignment, stages_behind(layout))


@settings(max_examples=30, deadline=None)
@given(rngs)
def test_groups_of_one_and_no_groups_change_nothing(rng: np.random.Generator) -> None:
    program = random_program(rng, handmade_layout(sorted(LAYOUTS)[int(rng.integers(len(LAYOUTS)))]))
    duration, delay = random_times(rng, program)
    plain = place_actions(program, duration, delay)
    alone, none = np.arange(program.num_actions), np.full(program.num_actions, -1)
    for groups in (alone, none):
        for one, other in zip(plain, place_actions(program, duration, delay, together=groups), strict=True):
            np.testing.assert_array_equal(one, other)


def test_members_wait_for_each_other_and_not_for_transfers() -> None:
    program = two_lanes()
    forward = [find(program, "llm", Pass.FORWARD, 0, [unit], replica) for unit, replica in ((0, 0), (1, 1))]
    backward = [find(program, "llm", Pass.BACKWARD, 0, [unit], replica) for unit, replica in ((0, 0), (1, 1))]
    together = np.full(program.num_actions, -1)
    together[backward] = 0
    took = durations(program, lambda view: 5.0 if view.replica else 1.0)
    start, end, wait = place_actions(program, took, no_delay(program), together=together)
    assert end[forward[0]] < end[forward[1]]
    assert start[backward[0]] == start[backward[1]] == end[forward[1]]
    # Waiting for a peer is no transfer; what held the slowest before they met is.
    assert not wait.any()
    hold = np.zeros(program.num_actions)
    hold[forward[1]] = 2.0
    start, _, wait = place_actions(program, took, no_delay(program), hold_s=hold, together=together)
    assert start[backward[0]] == start[backward[1]] == end[forward[1]] + 2.0
    assert wait[backward].tolist() == [2.0, 2.0]


def test_lanes_that_meet_in_different_orders_are_a_deadlock() -> None:
    program = two_lanes()
    together = np.full(program.num_actions, -1)
    first, second = (
        [find(program, "llm", Pass.FORWARD, 0, [unit + replica], replica) for replica in (0, 1)] for unit in (0, 2)
    )
    # Replica 0's first microbatch meets replica 1's second, and the other way round.
    together[[first[0], second[1]]], together[[second[0], first[1]]] = 0, 1
    with pytest.raises(DeadlockError, match=r"a cycle of waits: rank 0 at forward .*; rank 1 at forward"):
        place_actions(program, np.ones(program.num_actions), no_delay(program), together=together)
    fits = np.full(program.num_actions, -1)
    fits[first], fits[second] = 0, 1
    place_actions(program, np.ones(program.num_actions), no_delay(program), together=fits)
