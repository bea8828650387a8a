"""Optimus: the plan by hand, and what it costs."""

from __future__ import annotations

from entrain_bench.program.assignment import Assignment
from entrain_bench.simulate import place_actions
from entrain_bench_strategies.mdp import OptimusScheduler
from support.builders import durations, labels, makespan, no_delay, passes, profile_of, samples, tiny_job, uniform_batch
from support.dip import MEMORY, MODEL, colocated, peak_activations, program_of


def test_the_plan_by_hand() -> None:
    # Two ranks, three microbatches, the first with two sub-microbatches of images.
    shapes = samples((10, [400, 400]), (10, [400]), (10, [400]))
    assignment = Assignment((labels([0] * 4, [0, 1, 2, 3]), labels([0] * 3, [0, 1, 2])))
    profile = profile_of(tiny_job(MODEL), shapes)
    program = OptimusScheduler().schedule(shapes, colocated(2), assignment, profile)
    ahead = ["vision F0", "vision F1", "vision F2", "vision F3"]
    behind = ["vision B0", "vision B1", "vision B2", "vision B3"]
    assert passes(program, 0) == [*ahead, "llm F0", "llm F1", "llm B0", "llm F2", "llm B1", "llm B2", *behind]
    assert passes(program, 1) == [*ahead, "llm F0", "llm B0", "llm F1", "llm B1", "llm F2", "llm B2", *behind]
    # A forward takes 1, a backward 2. Rank 1 begins with the encoder at 1, with the LLM at 5 as rank 0 hands over, and
    # is through with its 1F1B at 14; rank 0 ends with it at 16 (it waits for the last gradient), then come four
    # backwards, on rank 1 first: 16 + 2, and three more each.
    times = durations(program, lambda view: 1.0 if "forward" in str(view) else 2.0 if "backward" in str(view) else 0.0)
    _, end, _ = place_actions(program, times, no_delay(program))
    vision, llm = program.forward_actions(0), program.backward_actions(1)
    assert end[vision].tolist() == [[1, 2], [2, 3], [3, 4], [4, 5]]
    # llm F0 on rank 0 waits for the second cut's end on rank 1 (3), and for its own encoder forwards (4).
    assert end[program.forward_actions(1)][0].tolist() == [5, 6]
    assert end[llm][0].tolist() == [10, 8]
    assert makespan(program, end) == end[program.backward_actions(0)].max()


def test_it_keeps_all_encoder_activations() -> None:
    shapes, assignment = uniform_batch(MODEL, 12)
    layout = colocated(2)
    profile = profile_of(tiny_job(MODEL, budget_bytes=1e12), shapes)
    one_group = peak_activations(layout, program_of(layout, shapes, assignment, budget_bytes=1.0))
    room = MEMORY.lane_state_bytes(layout).max() + 3.1 * one_group.max()
    phases = OptimusScheduler().schedule(shapes, layout, assignment, profile)
    limited = program_of(layout, shapes, assignment, budget_bytes=room)
    assert MEMORY.peak_bytes(limited).max() <= room < MEMORY.peak_bytes(phases).max()
    order = passes(phases, 0)
    assert order[:12] == [f"vision F{m}" for m in range(12)]
    assert order[-12:] == [f"vision B{m}" for m in range(12)]
