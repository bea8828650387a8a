"""Encoder offload between the first and the last of three phases, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from entrain_bench.costs.memory import Memory
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program import Pass, Program
from entrain_bench.program.layout import Layout
from entrain_bench.specs.job import Degrees
from support.builders import tiny_cluster
from support.hetero import MODEL, pair_layout, program_of

# Encoder TP1 DP2 on the two ranks of a two-stage LLM.
LAYOUT = pair_layout(Degrees(1, 1, 1, 2), Degrees(1, 1, 2, 1), colocated=True, num_ranks=2, batch=4)
PARAMETERS = MODEL.modules[0].parameters


def offloaded(layout: Layout) -> Layout:
    vision, llm = layout.modules
    return replace(layout, modules=(replace(vision, offload=True), llm))


def seconds(program: Program) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return CostTruth(MODEL, tiny_cluster()).price(program).duration_s


def test_weights_and_gradients_are_away_while_the_llm_runs() -> None:
    plain, away = program_of(LAYOUT, 4), program_of(offloaded(LAYOUT), 4)
    memory = Memory(MODEL)
    released = memory.over_program(plain)[0] - memory.over_program(away)[0]
    for lane in range(2):
        first, last = plain.lane_offsets[lane : lane + 2]
        # vision F, 4 forwards and 4 backwards of the LLM, vision B, and two steps of two modules
        views = plain.lane(lane)
        assert [view.module for view in views[:10]] == ["vision", *["llm"] * 8, "vision"]
        # bf16 weights and fp32 gradients
        expected = [0.0, *[6.0 * PARAMETERS] * 8, *[0.0] * (len(views) - 9)]
        assert released[first:last] == pytest.approx(expected, abs=1e-3)


def test_weights_cross_the_host_link_once_each_way() -> None:
    plain, away = program_of(LAYOUT, 4), program_of(offloaded(LAYOUT), 4)
    extra = seconds(away) - seconds(plain)
    # bf16 weights at 1e8 bytes/s
    expected = 2.0 * PARAMETERS / 1e8
    vision = [*away.forward_actions(0).ravel(), *away.backward_actions(0).ravel()]
    assert extra[vision] == pytest.approx([expected] * 4, rel=1e-9)
    assert np.delete(extra, vision) == pytest.approx(0.0, abs=1e-12)


def test_of_several_passes_the_last_forward_and_the_first_backward_carry_the_transfers() -> None:
    away = program_of(offloaded(LAYOUT), 8, passes_of_encoder=2)
    moved = Memory(MODEL).offload_bytes(away)
    for kind, microbatch in ((Pass.FORWARD, 1), (Pass.BACKWARD, 0)):
        carriers = [view for view in away.lane(0) if moved[view.index] and view.kind is kind]
        assert [(view.module, view.microbatch) for view in carriers] == [("vision", microbatch)]
    assert np.count_nonzero(moved) == 4
