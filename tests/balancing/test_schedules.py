"""Schedules of a chain: closed forms, three phases, and warm-ups within memory."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.schedules import (
    OneForwardOneBackward,
    chain_program,
    one_f_one_b,
    stages_behind,
    three_phase_program,
)
from entrain_bench.base.arrays import IntArray
from entrain_bench.program import Pass, Program
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.simulate import place_actions
from entrain_bench.specs.shapes import shapes_from_lists
from support.builders import (
    AV_MODEL,
    chain_layout,
    labels,
    makespan,
    no_delay,
    passes,
    placed,
    profile_of,
    tiny_job,
    tiny_model,
    uniform_batch,
    uniform_times,
)

F, B = Pass.FORWARD, Pass.BACKWARD


def uniform_program(
    encoder_stages: int, llm_stages: int, num_microbatches: int, dp: int = 1, warmup: list[IntArray] | None = None
) -> Program:
    model = tiny_model(encoder=4 if encoder_stages else 0, llm=8)
    layout = chain_layout(model, encoder_stages, llm_stages, num_microbatches, dp)
    shapes, assignment = uniform_batch(model, num_microbatches, dp)
    return chain_program(model, shapes, layout, assignment, warmup or stages_behind(layout))


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize(("encoder_stages", "llm_stages"), [(0, 1), (1, 1), (1, 2), (2, 2), (3, 1), (2, 4), (0, 4)])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 4, 7, 12])
@pytest.mark.parametrize(("forward", "backward"), [(1.0, 2.0), (3.0, 1.0)])
def test_uniform_1f1b_takes_the_closed_form(
    encoder_stages: int, llm_stages: int, num_microbatches: int, forward: float, backward: float, dp: int
) -> None:
    program = uniform_program(encoder_stages, llm_stages, num_microbatches, dp)
    stages = encoder_stages + llm_stages
    start, end = uniform_times(program, forward, backward)
    total = (num_microbatches + stages - 1) * (forward + backward)
    assert start.min() == 0.0
    assert makespan(program, end) == total
    # Bubble ratio of every lane: idle share of the iteration.
    busy = np.zeros(program.layout.num_lanes)
    for lane in range(program.layout.num_lanes):
        busy[lane] = sum(end[view.index] - start[view.index] for view in program.lane(lane))
    bubbles = 1.0 - busy / total
    assert bubbles == pytest.approx(np.full(len(busy), (stages - 1) / (num_microbatches + stages - 1)), abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=3, max_size=3), st.integers(1, 10), st.integers(1, 5), st.integers(1, 5))
def test_warmups_that_fall_by_at_least_one_never_cost_time(
    steps: list[int], num_microbatches: int, forward: int, backward: int
) -> None:
    warmup = np.cumsum([0, *steps])[::-1]
    program = uniform_program(2, 2, num_microbatches, warmup=[warmup[:2], warmup[2:]])
    _, end = uniform_times(program, forward, backward)
    assert makespan(program, end) <= (num_microbatches + 3) * (forward + backward)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(0, 15))
def test_slots_of_a_lane_are_a_permutation_in_1f1b_order(num_microbatches: int, warmup: int) -> None:
    forward, backward = one_f_one_b(np.arange(num_microbatches), np.array(num_microbatches), np.array(warmup))
    slots = dict.fromkeys(forward.tolist(), "F") | dict.fromkeys(backward.tolist(), "B")
    assert sorted(slots) == list(range(2 * num_microbatches))
    ahead = min(warmup, num_microbatches)
    expected = "F" * ahead + "FB" * (num_microbatches - ahead) + "B" * ahead
    assert "".join(slots[slot] for slot in range(2 * num_microbatches)) == expected
    assert np.all(np.diff(forward) > 0)
    assert np.all(np.diff(backward) > 0)


def test_three_phases_of_two_encoders_that_are_split_otherwise_than_the_llm() -> None:
    # Both encoders on two ranks together, a replica of the LLM on each.
    vision, audio, llm = AV_MODEL.modules
    together = [placed(module, [[[0, 1]]], tp=2) for module in (vision, audio)]
    layout = Layout((*together, placed(llm, [[[0]], [[1]]])), 1)
    shapes = shapes_from_lists(["image", "audio"], [(10, [("image", 40, 10), ("audio", 30, 10)])] * 2)
    encoders = [labels([0, 0], [0, 0])] * 2
    program = three_phase_program(AV_MODEL, shapes, layout, Assignment((*encoders, labels([0, 1], [0, 0]))))
    for lane in range(2):
        assert passes(program, lane) == ["vision F0", "audio F0", "llm F0", "llm B0", "audio B0", "vision B0"]
        assert [view.replica for view in program.lane(lane)][2:4] == [lane, lane]


MODEL = tiny_model(encoder=4, llm=4)


def leading_forwards(program: Program) -> list[int]:
    """Forwards of every lane before its first backward."""
    lanes = [program.lane_actions[low:high] for low, high in pairwise(program.lane_offsets)]
    return [int(np.argmax(program.kind[lane] == Pass.BACKWARD)) for lane in lanes]


@pytest.mark.parametrize(
    ("eager", "most", "extra"),
    [
        ("none", 3, [0, 0, 0, 0]),
        ("encoder", 0, [0, 0, 0, 0]),
        ("encoder", 3, [3, 3, 0, 0]),
        ("all", 3, [3, 3, 3, 3]),
        # 12 microbatches: eleven, ten, ... forwards ahead of the one that its backward follows.
        ("encoder", None, [8, 8, 0, 0]),
        ("all", 100, [8, 8, 8, 8]),
    ],
)
def test_extra_forwards_are_capped_where_memory_is_no_limit(eager: str, most: int | None, extra: list[int]) -> None:
    layout = chain_layout(MODEL, 2, 2, 12)
    shapes, assignment = uniform_batch(MODEL, 12)
    profile = profile_of(tiny_job(MODEL, budget_bytes=1e15), shapes)
    program = OneForwardOneBackward(eager, most).schedule(shapes, layout, assignment, profile)
    assert leading_forwards(program) == [1 + behind + more for behind, more in zip([3, 2, 1, 0], extra, strict=True)]
    place_actions(program, np.ones(program.num_actions), no_delay(program))
