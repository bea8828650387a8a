"""How long transfers hold the lanes at both ends, worked by hand."""

from __future__ import annotations

import numpy as np

from entrain_bench.balancing.schedules import chain_program
from entrain_bench.base.arrays import FloatArray, rows_of
from entrain_bench.costs.edges import held_s, moved_s
from entrain_bench.program import ActionView, Pass, Program
from entrain_bench.program.assignment import same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.simulate import place_actions
from support.builders import (
    as_ints,
    durations,
    find,
    no_delay,
    placed,
    samples,
    tiny_model,
    two_ranks,
)

MODEL = tiny_model(encoder=2, llm=2)
VISION, LLM = MODEL.modules


def of_travelling(program: Program, link_s: float, fixed_s: float) -> tuple[FloatArray, FloatArray]:
    travels = program.dep_bytes > 0
    return np.where(travels, link_s, 0.0), np.where(travels, fixed_s, 0.0)


def held_by(program: Program, hold_s: FloatArray) -> dict[str, float]:
    """Holds of lanes after each pass, by a short name."""

    def name(view: ActionView) -> str:
        return f"{view.module} {'FB'[int(view.kind)]}{view.microbatch}"

    passes = [program.view(int(action)) for action in np.flatnonzero(program.chunk >= 0)]
    return {name(view): float(hold_s[view.index]) for view in passes}


def test_a_lane_is_held_for_what_it_sends_or_what_its_next_action_receives() -> None:
    # Encoder: F0 F1 B0 B1 (what fills a pipeline of two); LLM: F0 B0 F1 B1. Every transfer takes 3 + 1 s.
    program = two_ranks(MODEL, 2)
    hold = held_by(program, held_s(program, *moved_s(program, *of_travelling(program, 3.0, 1.0))))
    assert hold == {
        "vision F0": 4.0,
        "vision F1": 4.0,
        "vision B0": 4.0,  # receives for B1
        "vision B1": 0.0,
        "llm F0": 0.0,  # what B0 needs is there
        "llm B0": 4.0,  # sends, and receives for F1 at the same time
        "llm F1": 0.0,
        "llm B1": 4.0,
    }


def test_links_add_up_and_latencies_go_by_together() -> None:
    # Encoder microbatches of three replicas feed one LLM microbatch, after another one that is there already.
    layout = Layout((placed(VISION, [[[0]], [[1]], [[2]]]), placed(LLM, [[[3]]])), 2)
    shapes = samples((10, []), (10, [40]), (10, [40]), (10, [40]))
    microbatch, zero = as_ints([0, 1, 1, 1]), np.zeros(4, np.int64)
    assignment = same_microbatches(MODEL, shapes, zero, microbatch, microbatch, encoder_replica=as_ints([0, 0, 1, 2]))
    program = chain_program(MODEL, shapes, layout, assignment, [as_ints([9]), as_ints([0])])
    link_s, fixed_s = of_travelling(program, 3.0, 0.0)
    into = rows_of(program.dep_offsets) == find(program, "llm", Pass.FORWARD, 0, [1, 2, 3])
    fixed_s[into & (link_s > 0)] = [1.0, 5.0, 2.0]
    hold = held_s(program, *moved_s(program, link_s, fixed_s))
    assert hold[find(program, "llm", Pass.BACKWARD, 0, [0])] == 3 * 3.0 + 5.0
    assert hold[find(program, "vision", Pass.FORWARD, 0, [0], replica=0)] == 3.0 + 1.0
    assert hold[find(program, "llm", Pass.BACKWARD, 0, [1, 2, 3])] == 9.0


def test_a_held_lane_starts_later_and_waits_for_transfers() -> None:
    program = two_ranks(MODEL, 2)
    link_s, fixed_s = of_travelling(program, 3.0, 1.0)
    hold = held_s(program, *moved_s(program, link_s, fixed_s))
    took = durations(program, lambda _: 10.0)
    start, end, wait = place_actions(program, took, link_s + fixed_s, hold_s=hold)
    # encoder F0 0-10, held to 14, F1 14-24; LLM F0 14-24, B0 24-34, held to 38; F1 38-48 (its data are there at 28).
    assert start[find(program, "vision", Pass.FORWARD, 0, [1])] == 14.0
    assert wait[find(program, "vision", Pass.FORWARD, 0, [1])] == 4.0
    first, second = (find(program, "llm", Pass.FORWARD, 0, [k]) for k in (0, 1))
    assert start[[first, second]].tolist() == [14.0, 38.0]
    assert wait[[first, second]].tolist() == [4.0, 4.0]
    assert end.max() == 10.0 + max(start[program.chunk >= 0])
    free, _, _ = place_actions(program, took, no_delay(program))
    assert free[second] == 30.0
