"""Encoder offload between the first and the last of three phases, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from entrain_bench.balancing.profile import Profile
from entrain_bench.base.errors import OutOfMemoryError
from entrain_bench.costs.memory import Memory
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program import Pass, Program
from entrain_bench.program.layout import Layout
from entrain_bench.specs.job import PLANNING_SHARE, Degrees, LayoutRequest
from entrain_bench_strategies.hetero import ColocatedPlanner
from support.builders import profile_of, samples, tiny_cluster, tiny_job
from support.hetero import MODEL, pair_layout, program_of, system

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


def test_nothing_leaves_where_microbatches_take_turns() -> None:
    layout = pair_layout(Degrees(1, 1, 1, 2), Degrees(2, 1, 1, 1), colocated=True, num_ranks=2)
    plain, away = program_of(layout, 4), program_of(offloaded(layout), 4)
    memory = Memory(MODEL)
    assert np.array_equal(memory.over_program(plain), memory.over_program(away))
    assert np.array_equal(seconds(plain), seconds(away))


@pytest.mark.wide
def test_the_planner_offloads_where_nothing_else_fits() -> None:
    shapes = samples((3000, [40]))

    def profile_with(budget_bytes: float) -> Profile:
        request = LayoutRequest(tp=1, cp=1, pp=2, dp=1)
        job = tiny_job(
            MODEL, tiny_cluster(1, 2), global_batch=4, microbatch_size=1, request=request, budget_bytes=budget_bytes
        )
        return profile_of(job, shapes)

    def least_budget(planner: ColocatedPlanner) -> tuple[float, Layout]:
        low, high = 0.0, float(2**25)
        layout = system(planner).plan(profile_with(high))
        while high - low > 20_000:
            middle = (low + high) / 2
            try:
                layout, high = system(planner).plan(profile_with(middle)), middle
            except OutOfMemoryError:
                low = middle
        return high, layout

    without, kept = least_budget(ColocatedPlanner(encoder_tp=1, profile_samples=4))
    with_offload, away = least_budget(ColocatedPlanner(encoder_tp=1, offload_encoder=True, profile_samples=4))
    assert [module.offload for module in kept.modules] == [False, False]
    assert [module.offload for module in away.modules] == [True, False]
    saved = (without - with_offload) * PLANNING_SHARE
    # All of the encoder's weights and gradients, for the LLM's phase is where memory peaks.
    assert saved == pytest.approx(6 * PARAMETERS, abs=40_000)
    # With memory to spare, transfers are not worth it.
    roomy = system(ColocatedPlanner(profile_samples=4, offload_encoder=True)).plan(profile_with(2.0**25))
    assert [module.offload for module in roomy.modules] == [False, False]
