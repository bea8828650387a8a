"""Actions that begin together: barriers before them, and deadlocks that they cause."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.base.errors import DeadlockError
from entrain_bench.program import Pass, Program
from entrain_bench.program.layout import Layout
from entrain_bench.simulate import place_actions
from support.builders import durations, find, no_delay, placed, rngs, tiny_model, uniform_batch
from support.programs import LAYOUTS, handmade_layout, random_program, random_times

MODEL = tiny_model(encoder=0)


def two_lanes() -> Program:
    layout = Layout((placed(MODEL.llm, [[[0]], [[1]]]),), 2)
    shapes, assignment = uniform_batch(MODEL, 2, dp=2)
    return chain_program(MODEL, shapes, layout, assignment, stages_behind(layout))


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
