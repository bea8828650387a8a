"""Heterogeneous parallelism: boundary groups, slices, and the wrong routes that are refused."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.schedules import three_phase_program
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program.assignment import Assignment, ModuleAssignment, same_microbatches
from entrain_bench.program.layout import Layout, find_ratio
from entrain_bench.program.validate import check_program
from entrain_bench.simulate import place_actions
from entrain_bench.specs.job import Degrees
from entrain_bench_strategies.hetero import (
    BatchSlices,
    ColocatedScheduler,
    GraphAwareScheduler,
    slice_rows,
)
from support.builders import (
    durations,
    no_delay,
    placed,
    profile_of,
    random_samples,
    samples,
    tiny_cluster,
    tiny_job,
)
from support.hetero import MODEL, pair_layout, profile_for, program_of


def feeds(assignment: Assignment) -> set[tuple[int, int]]:
    """Which encoder replica feeds which LLM replica, for samples of one item each."""
    vision, llm = assignment.modules
    return set(zip(vision.replica.tolist(), llm.replica.tolist(), strict=True))


def test_fan_in_joins_neighbours_on_the_llm_replicas_ranks() -> None:
    # arXiv:2605.27678, section 1: encoder TP2 DP4 -> LLM TP4 DP2 gathers over the ranks {0,2}, {1,3}, {4,6}, {5,7}.
    layout = pair_layout(Degrees(2, 1, 1, 4), Degrees(4, 1, 1, 2), colocated=True)
    vision, llm = layout.modules
    assignment = BatchSlices().assign(samples(*[(10, [40])] * 8), layout, profile_for(microbatch_size=2))
    found = feeds(assignment)
    assert found == {(0, 0), (1, 0), (2, 1), (3, 1)}
    gathers = []
    for target in range(llm.dp):
        sources = sorted(u for u, v in found if v == target)
        assert np.union1d(vision.ranks[sources[0]], vision.ranks[sources[1]]).tolist() == llm.ranks[target, 0].tolist()
        gathers += [{int(vision.ranks[u, 0, lane]) for u in sources} for lane in range(vision.tp)]
    assert gathers == [{0, 2}, {1, 3}, {4, 6}, {5, 7}]
    # Microbatches of 2 go round: replica 0 has samples 0 1 | 4 5, of which encoder replica 0 takes the first of each.
    assert assignment.modules[0].replica.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert assignment.modules[0].microbatch.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_fan_out_slices_one_encoder_replica_among_neighbours() -> None:
    layout = pair_layout(Degrees(4, 1, 1, 2), Degrees(2, 1, 1, 4), colocated=True)
    assert (find_ratio(*layout.modules).fan_in, find_ratio(*layout.modules).fan_out) == (1, 2)
    assignment = BatchSlices().assign(samples(*[(10, [40])] * 8), layout, profile_for())
    assert feeds(assignment) == {(0, 0), (0, 1), (1, 2), (1, 3)}
    program = program_of(layout, 8)
    # An encoder action holds the lanes of both its LLM replicas; one microbatch of it serves both.
    assert program.num_lanes[program.forward_actions(0)].ravel().tolist() == [2] * 4
    assert program.num_lanes[program.forward_actions(1)].ravel().tolist() == [1] * 8
    start, _, _ = place_actions(program, np.ones(program.num_actions), no_delay(program))
    assert start[program.forward_actions(0)].ravel().tolist() == [0, 4, 0, 4]
    assert start[program.forward_actions(1)].ravel().tolist() == [1, 5] * 4


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=60), st.integers(1, 7))
def test_slices_are_contiguous_and_even(rows: list[int], count: int) -> None:
    row = np.array(rows, np.int64)
    cut = slice_rows(row, count)
    for value in set(rows):
        mine = cut[row == value]
        assert np.all(np.diff(mine) >= 0)
        sizes = np.bincount(mine, minlength=count)
        assert len(sizes) == count
        assert sizes.max() - sizes.min() <= 1


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.integers(1, 3))
def test_any_integer_ratio_runs_colocated_and_apart(seed: int, encoder_dp: int, llm_dp: int, chunks: int) -> None:
    shapes = random_samples(np.random.default_rng(seed), 32)
    profile = profile_of(tiny_job(MODEL, tiny_cluster(2, 8)), shapes)
    for pp, colocated in product((1, 2), (True, False)):
        ranks = max(encoder_dp, llm_dp * pp)
        grids = [np.arange(ranks).reshape(encoder_dp, 1, -1), np.arange(llm_dp * pp).reshape(llm_dp, pp, 1)]
        if colocated:
            grids[1] = np.arange(ranks).reshape(llm_dp, pp, -1)
            if (ranks // encoder_dp) * encoder_dp != ranks or ranks % (llm_dp * pp):
                continue
        else:
            grids[1] = grids[1] + ranks
        modules = [placed(m, g, tp=g.shape[2]) for m, g in zip(MODEL.modules, grids, strict=True)]
        layout = Layout(tuple(modules), 32)
        assignment = BatchSlices(chunks).assign(shapes, layout, profile)
        scheduler = ColocatedScheduler() if colocated else GraphAwareScheduler()
        program = scheduler.schedule(shapes, layout, assignment, profile)
        check_program(program)
        _, end, _ = place_actions(program, np.ones(program.num_actions), no_delay(program))
        assert np.all(np.isfinite(end))


# Planted faults


@pytest.mark.parametrize("colocated", [True, False])
def test_a_wrong_route_with_valid_shapes_is_refused(colocated: bool) -> None:
    llm = Degrees(4, 1, 1, 2) if colocated else Degrees(2, 1, 1, 2)
    encoder = Degrees(2, 1, 1, 4) if colocated else Degrees(1, 1, 1, 4)
    layout = pair_layout(encoder, llm, colocated=colocated)
    profile, shapes = profile_for(microbatch_size=2), samples(*[(10, [40])] * 8)
    scheduler = ColocatedScheduler() if colocated else GraphAwareScheduler()
    right = BatchSlices().assign(shapes, layout, profile)
    scheduler.schedule(shapes, layout, right, profile)
    vision = right.modules[0]
    # The interleaved mapping {0, 2}, {1, 3} of replicas: same sizes, other ranks.
    wrong = ModuleAssignment(np.array([0, 2, 1, 3])[vision.replica], vision.microbatch)
    with pytest.raises(
        IncompatibleError, match=r"sample 1 is encoded by replica 2 of 4 of vision, which does not feed"
    ):
        scheduler.schedule(shapes, layout, Assignment((wrong, right.modules[1])), profile)


def test_a_wrong_route_would_change_the_times() -> None:
    # What the check is for: three phases run any route, but a wrong one waits for the wrong ranks.
    layout = pair_layout(Degrees(2, 1, 1, 4), Degrees(2, 1, 2, 2), colocated=True)
    profile, shapes = profile_for(), samples(*[(10, [40 * (1 + index)]) for index in range(4)])
    right = BatchSlices().assign(shapes, layout, profile)
    wrong = ModuleAssignment(np.array([0, 2, 1, 3])[right.modules[0].replica], right.modules[0].microbatch)
    ends = []
    for vision in (right.modules[0], wrong):
        program = three_phase_program(MODEL, shapes, layout, Assignment((vision, right.modules[1])))
        seconds = durations(program, lambda view: float(1 + sum(view.members)) if view.module == "vision" else 1.0)
        _, end, _ = place_actions(program, seconds, no_delay(program))
        ends.append(np.sort(end[program.forward_actions(1)].ravel()).tolist())
    assert ends[0] != ends[1]


def test_each_schedule_refuses_the_other_placement() -> None:
    shapes = samples(*[(10, [40])] * 2)
    zero = np.zeros(2, np.int64)
    assignment = same_microbatches(MODEL, shapes, zero, np.arange(2), np.arange(2))
    vision, llm = MODEL.modules
    apart = Layout((placed(vision, [[[0]]]), placed(llm, [[[1]]])), 2)
    first_stage = Layout((placed(vision, [[[0]]]), placed(llm, [[[0], [1]]])), 2)
    for layout in (apart, first_stage):
        with pytest.raises(IncompatibleError, match="the same ranks"):
            ColocatedScheduler().schedule(shapes, layout, assignment, profile_for())
    with pytest.raises(IncompatibleError, match="on different ranks"):
        GraphAwareScheduler().schedule(shapes, first_stage, assignment, profile_for())
