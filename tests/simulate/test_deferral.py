"""Chains with deferral, split backward, shared stages and uneven replicas, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.program import ActionView, Pass, Program
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.validate import check_program
from entrain_bench.simulate import place_actions
from support.builders import (
    chain_layout,
    durations,
    labels,
    makespan,
    no_delay,
    passes,
    samples,
    tiny_model,
    uniform_batch,
)

F = Pass.FORWARD

# Deferral and split backward by hand. Samples a, b, c, d have one item each, so item and sample numbers agree; a and b
# form encoder microbatch 0, and b's LLM work is deferred to LLM microbatch 1.


def deferred_program(encoder_stages: int, llm_stages: int, count: int, split: bool) -> Program:
    model = tiny_model(encoder=4, llm=8)
    layout = chain_layout(model, encoder_stages, llm_stages, count)
    shapes = samples(*[(10, [40])] * (count + 1))
    encoder, llm = [0, 0, 1, 2][: count + 1], [0, 1, 1, 2][: count + 1]
    zeros = [0] * (count + 1)
    assignment = Assignment((labels(zeros, encoder), labels(zeros, llm)))
    program = chain_program(model, shapes, layout, assignment, stages_behind(layout), split)
    check_program(program)
    return program


def drawn(program: Program, seconds: dict[str, float]) -> list[str]:
    """What every lane does in each second: a chunk's first unit, large in its forward; durations ``vision F ab``."""

    def name(view: ActionView) -> str:
        return "".join("abcd"[unit] for unit in view.members)

    took = durations(program, lambda view: seconds[f"{view.module} {'FB'[view.kind]} {name(view)}"])
    start, end, _ = place_actions(program, took, no_delay(program))
    assert np.all(end - start == took)
    lines = []
    for lane in range(program.layout.num_lanes):
        line = ["."] * int(end.max())
        for view in program.lane(lane):
            letter = name(view)[:1]
            span = slice(int(start[view.index]), int(end[view.index]))
            line[span] = (letter.upper() if view.kind is F else letter) * int(took[view.index])
        lines.append("".join(line).rstrip("."))
    return lines


TWO_STAGE_S = {
    "vision F a": 2.0,
    "vision F b": 1.0,
    "vision F ab": 3.0,
    "vision F c": 3.0,
    "vision B a": 4.0,
    "vision B b": 2.0,
    "vision B ab": 6.0,
    "vision B c": 5.0,
    "llm F a": 3.0,
    "llm B a": 5.0,
    "llm F bc": 4.0,
    "llm B bc": 6.0,
}


def test_two_stages_split_backward_runs_the_kept_chunk_at_once() -> None:
    # The LLM's A = {a} needs only the kept chunk of encoder microbatch 0, whose backward runs as soon as it can; B is
    # {b, c}. The deferred chunk's backward is in its partner's slot and before the partner.
    assert drawn(deferred_program(1, 1, 2, split=True), TWO_STAGE_S) == [
        "AABCCC....aaaa......bbccccc",
        "..AAAaaaaaBBBBbbbbbb",
    ]


def test_two_stages_unsplit_backward_waits_for_the_deferred_sample() -> None:
    # On the encoder A = {a, b}; on the LLM A = {a}, B = {b, c}.
    assert drawn(deferred_program(1, 1, 2, split=False), TWO_STAGE_S) == [
        "AAACCC...............aaaaaaccccc",
        "...AAAaaaaaBBBBbbbbbb",
    ]


def test_two_encoder_stages_with_an_unpaired_last_microbatch() -> None:
    seconds = {f"vision {p} {u}": (2.0, 3.0)[p == "B"] - (u == "b") for p in "FB" for u in "abcd"}
    seconds |= {f"llm {p} {u}": (2.0, 3.0)[p == "B"] for p in "FB" for u in ("a", "bc", "d")}
    # On the LLM A = {a}, B = {b, c}, D = {d}.
    assert drawn(deferred_program(2, 1, 3, split=True), seconds) == [
        "AABCCDD.....aaa.bb.cccddd",
        "..AABCC..aaaDDbbcccddd",
        "....AAaaaBBbbbDDddd",
    ]


def test_without_deferral_split_backward_changes_nothing() -> None:
    model = tiny_model()
    layout = chain_layout(model, 1, 2, 5)
    shapes, assignment = uniform_batch(model, 5)
    programs = [
        chain_program(model, shapes, layout, assignment, stages_behind(layout), split) for split in (False, True)
    ]
    for column in ("lane_offsets", "lane_actions", "dep_offsets", "dep_actions", "dep_bytes"):
        assert np.array_equal(*(getattr(program, column) for program in programs))


@pytest.mark.parametrize("split", [False, True])
def test_a_batch_of_text_alone_runs(split: bool) -> None:
    model = tiny_model()
    layout = chain_layout(model, 1, 2, 2)
    shapes = samples((10, []), (20, []))
    assignment = Assignment((labels([], []), labels([0, 0], [0, 1])))
    program = chain_program(model, shapes, layout, assignment, stages_behind(layout), split)
    check_program(program)
    _, end, _ = place_actions(program, durations(program, lambda _: 1.0), no_delay(program))
    assert makespan(program, end) == 2 * 2 + 2
    assert passes(program, 0) == []
