"""Braid as a whole: its layouts, whom it gives which work, its search, and what it says when it cannot."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings

from entrain_bench.balancing.chunk_estimates import packed_iteration_s
from entrain_bench.balancing.interleaved import Interleaved
from entrain_bench.balancing.recomputation import recompute_all
from entrain_bench.base.errors import DeadlockError, IncompatibleError, UserError
from entrain_bench.program.assignment import check_assignment
from entrain_bench.program.layout import Layout, check_layout
from entrain_bench.program.validate import check_program
from entrain_bench.specs.job import Degrees
from entrain_bench_strategies.braid import BraidAssigner, BraidPlanner, BraidScheduler
from entrain_bench_strategies.braid.assigner import find_places, spread_chunks
from entrain_bench_strategies.braid.planner import (
    WORST,
    ShapeWork,
    encoder_degrees,
    list_shapes,
    llm_places,
    place,
    split_layers,
)
from support.braid import BRAID, MODEL, assigned_in_chunks, layout_of, profile_for, shape
from support.builders import (
    GIB,
    generating_model,
    random_samples,
    rngs,
    samples,
)

# Layouts


def test_copies_of_an_encoder_cover_the_blocks_of_their_replica() -> None:
    profile = profile_for()
    # Two segments of one block, and in each two copies of one rank.
    encoder, llm = layout_of(profile, shape(encoder_tp=1, segments=2)).modules
    assert encoder.ranks.tolist() == [[[rank]] for rank in range(8)]
    assert llm.ranks.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    # One chain of two blocks, two copies abreast.
    encoder, _ = layout_of(profile, shape(encoder_tp=1)).modules
    assert encoder.ranks.tolist() == [[[0], [2]], [[1], [3]], [[4], [6]], [[5], [7]]]


def test_a_stage_of_an_encoder_takes_several_blocks_and_the_llm_only_some() -> None:
    profile = profile_for()
    wide = shape(tp=1, pp=4, dp=2, encoder_tp=1, encoder_cp=2, segments=2, llm_stages=2)
    encoder, llm = layout_of(profile, wide).modules
    assert encoder.ranks.tolist() == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]
    assert llm.ranks.tolist() == [[[0], [1]], [[4], [5]]]
    spread = replace(wide, segments=1, llm_stride=2)
    encoder, llm = layout_of(profile, spread).modules
    assert encoder.ranks.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert llm.ranks.tolist() == [[[0], [2]], [[4], [6]]]


def test_no_shape_is_faster_than_its_least_time() -> None:
    profile = profile_for()
    work = ShapeWork(profile, profile.samples.draw(64))
    for one in list_shapes(profile.job, [(False, False)], BraidPlanner()):
        assert split_layers(work, one)[1] >= work.least_s(one) * (1 - 1e-9)
        assert work.least_s(one) >= work.longest_s(one)


def test_layouts_are_rated_in_order_and_none_of_the_best_is_missed() -> None:
    profile, planner = profile_for(), BraidPlanner(microbatches=(1,))
    work = ShapeWork(profile, profile.samples.draw(64))
    rated = [*planner.rated(profile, work, recompute_later=True)]
    all_s = []
    for one in list_shapes(profile.job, [(False, False)], planner):
        layers, busiest_s = split_layers(work, one)
        layout = place(profile.job, one, layers)
        check_layout(layout, profile.job.model, profile.job.cluster)
        all_s.append(max(busiest_s, work.longest_s(one)) + profile.programs.step_s(layout))
    near = sorted(each for each in all_s if each <= WORST * min(all_s))
    assert 1 < len(near) < len(all_s)
    assert [each.estimated_s for each in rated] == pytest.approx(near, rel=1e-8)


def test_degrees_of_encoders_divide_those_of_the_llm() -> None:
    job = profile_for().job
    assert [*encoder_degrees(job, Degrees(2, 2, 1, 2), BraidPlanner(spans=()))] == [
        (2, 2),
        (2, 1),
        (1, 1),
        (1, 2),
        (1, 4),
    ]
    assert [*encoder_degrees(job, Degrees(2, 2, 1, 2), BraidPlanner(encoder_degrees=False))] == [(2, 2)]
    # Two stations of one rank; four, as context parallelism only: a node has four ranks.
    assert [*encoder_degrees(job, Degrees(1, 1, 4, 2), BraidPlanner())] == [
        (1, 1),
        (1, 2),
        (2, 1),
        (1, 4),
        (4, 1),
    ]
    assert llm_places(job, Degrees(1, 1, 4, 2), spread=True) == [(4, 1), (2, 1), (2, 2), (1, 1), (1, 4)]
    assert llm_places(job, Degrees(1, 1, 4, 2), spread=False) == [(4, 1)]
    found = [*list_shapes(job, [(False, False)], BraidPlanner())]
    assert len(found) == len({*found})
    for one in found:
        width = one.degrees.tp * one.degrees.cp
        assert one.copies_abreast * one.encoder_tp * one.encoder_cp == one.blocks_abreast * width
        assert one.segments * one.encoder_stages * one.blocks_abreast == one.degrees.pp


# Who gets what


def test_the_llm_comes_with_the_last_encoder_chunk_of_its_microbatch() -> None:
    # Microbatch 0 of replica 0 has two chunks, so its LLM's place is 1; without items there is one place.
    replica, microbatch = np.array([0, 0, 0, 1]), np.array([0, 0, 1, 0])
    items = np.array([0, 1, 2]), np.array([0, 1, 0])
    first, middle = find_places(replica, microbatch, [items])
    assert first.tolist() == [0, 0, 2, 0]
    assert middle.tolist() == [1, 1, 2, 0]
    # A generator's two chunks take the LLM's place and the one behind it.
    first, middle = find_places(replica, microbatch, [items], [items])
    assert first.tolist() == [0, 0, 3, 0]
    assert middle.tolist() == [1, 1, 3, 0]


def test_a_chunk_goes_to_the_copy_furthest_below_its_share() -> None:
    chunk = np.arange(4)
    copy = spread_chunks(np.zeros(4, np.int64), chunk, np.ones(4), np.array([[0.75, 0.25, 0.0]]))
    assert copy.tolist() == [0, 0, 0, 1]
    # A heavy chunk goes where most is left, whatever came before it.
    heavy = spread_chunks(
        np.zeros(5, np.int64), np.arange(5), np.array([1.0, 1.0, 1.0, 1.0, 9.0]), np.array([[0.3, 0.7]])
    )
    assert heavy.tolist() == [0, 0, 0, 0, 1]
    # Items of a chunk stay together.
    assert (
        len({*spread_chunks(np.zeros(3, np.int64), np.array([5, 5, 5]), np.ones(3), np.full((1, 2), 0.5)).tolist()})
        == 1
    )


@given(rngs)
@settings(max_examples=20, deadline=None)
def test_items_are_encoded_in_the_replica_that_needs_them(rng: np.random.Generator) -> None:
    profile = profile_for()
    layout = layout_of(profile, shape(encoder_tp=1, segments=2))
    shapes = random_samples(rng, int(rng.integers(1, 40)))
    assignment = assigned_in_chunks(shapes, layout, profile)
    check_assignment(assignment, MODEL, layout, shapes)
    items, llm = assignment.modules
    owner = shapes.item_sample[MODEL.modules[0].units(shapes)]
    assert np.array_equal(items.replica // 4, llm.replica[owner])
    assert np.all(items.microbatch <= llm.microbatch[owner])
    # No two microbatches share a place.
    pairs = {*zip(items.replica // 4, items.microbatch, llm.microbatch[owner], strict=True)}
    assert len(pairs) == len({pair[:2] for pair in pairs})
    check_program(BraidScheduler(rollouts=4).schedule(shapes, layout, assignment, profile))


def test_what_a_generator_makes_waits_for_its_sample() -> None:
    profile = profile_for(GENERATING, dp=2, tp=1)
    wanted = shape(tp=1, pp=4, encoder_tp=1, segments=2, recompute=(False,) * 3)
    layout = layout_of(profile, wanted)
    # Two copies of two stages each, as of the encoder.
    assert [placed.dp for placed in layout.modules] == [4, 2, 4]
    assert np.array_equal(layout.modules[0].ranks, layout.modules[2].ranks)
    shapes = random_samples(np.random.default_rng(2), 48)
    assignment = assigned_in_chunks(shapes, layout, profile)
    check_assignment(assignment, GENERATING, layout, shapes)
    _, llm, made = assignment.modules
    owner = shapes.item_sample[GENERATING.modules[2].units(shapes)]
    assert np.array_equal(made.replica // 2, llm.replica[owner])
    assert np.all(made.microbatch >= llm.microbatch[owner])
    program = BraidScheduler(rollouts=16).schedule(shapes, layout, assignment, profile)
    check_program(program)
    assert packed_iteration_s(program, profile) == pytest.approx(profile.trial_s(program), rel=0.1)


def test_a_chain_has_encoders_on_its_first_block_and_generators_on_its_last() -> None:
    profile = profile_for(GENERATING)
    wanted = shape(tp=1, pp=4, recompute=(False,) * 3, chain=True)
    work = ShapeWork(profile, profile.samples.draw(64))
    layers, busiest_s = split_layers(work, wanted)
    encoder, llm, generator = place(profile.job, wanted, layers).modules
    assert encoder.ranks.tolist() == [[[0]], [[4]]]
    assert llm.ranks.tolist() == [[[0], [1], [2], [3]], [[4], [5], [6], [7]]]
    assert generator.ranks.tolist() == [[[3]], [[7]]]
    before, own, behind = (work.layers_s(wanted, index) for index in range(3))
    cuts = [(0, *cut, len(own)) for cut in combinations(range(1, len(own)), 3)]
    stages = [[own[low:high].sum() for low, high in pairwise(cut)] for cut in cuts]
    busiest = [max(first + before.sum(), *inner, last + behind.sum()) for first, *inner, last in stages]
    assert busiest_s == pytest.approx(min(busiest))


@pytest.mark.parametrize("room", [0.6, 0.9])
def test_a_chain_with_a_generator_without_room_is_scheduled_where_1f1b_deadlocks(room: float) -> None:
    profile = profile_for(GENERATING)
    layout = layout_of(profile, shape(tp=1, pp=2, dp=1, recompute=(False,) * 3, chain=True, num_microbatches=4))
    shapes = profile.samples.draw(32)
    assignment = BraidAssigner().assign(shapes, layout, profile)
    with pytest.raises(DeadlockError):
        packed_iteration_s(Interleaved().schedule(shapes, layout, assignment, profile), profile)
    ample = BraidScheduler(rollouts=0).schedule(shapes, layout, assignment, profile)
    state = profile.memory.lane_state_bytes(layout).max()
    limit = state + room * (profile.memory.peak_bytes(ample).max() - state)
    budget = limit * profile.job.memory_budget_bytes / profile.job.planning_budget_bytes
    tight = profile.for_job(replace(profile.job, memory_budget_bytes=float(budget)))
    program = BraidScheduler(rollouts=0).schedule(shapes, layout, assignment, tight)
    assert program.remade
    check_program(program)


# As a user meets it


GENERATING = generating_model()


@pytest.mark.wide
def test_memory_makes_it_recompute_or_refuse() -> None:
    profile = profile_for(dp=2, tp=1)
    needed = max(
        profile.memory.peak_bytes(BRAID.program(profile.samples.draw(32), BRAID.plan(profile), profile)).max()
        for _ in range(2)
    )
    tight = profile.for_job(replace(profile.job, memory_budget_bytes=0.6 * needed))
    program = BRAID.program(tight.samples.draw(32), BRAID.plan(tight), tight)
    assert tight.memory.peak_bytes(program).max() <= tight.job.memory_budget_bytes
    with pytest.raises(UserError, match="more than planners may use of the budget"):
        BRAID.plan(profile.for_job(replace(profile.job, memory_budget_bytes=1e5)))
    assert needed < 16 * GIB


def test_searches_keep_what_a_tight_memory_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if rollouts cost nothing: iterations of a tiny model could not afford all searches.
    monkeypatch.setattr("entrain_bench_strategies.braid.scheduler.ACTION_S", 1e-12)
    profile = profile_for(dp=2, tp=1)
    layout = layout_of(profile, shape(tp=1, pp=4, encoder_tp=1, segments=4))
    shapes = profile.samples.draw(32)
    assignment = BraidAssigner().assign(shapes, layout, profile)

    def believed_s(share: float) -> float:
        ample = BraidScheduler(rollouts=0).schedule(shapes, layout, assignment, profile)
        state = profile.memory.lane_state_bytes(layout).max()
        room = share * (profile.memory.peak_bytes(ample).max() - state) + state
        budget = room * profile.job.memory_budget_bytes / profile.job.planning_budget_bytes
        tight = profile.for_job(replace(profile.job, memory_budget_bytes=float(budget)))
        program = BraidScheduler(rollouts=32).schedule(shapes, layout, assignment, tight)
        assert program.remade
        assert tight.memory.peak_bytes(program).max() <= tight.job.planning_budget_bytes
        return packed_iteration_s(program, tight)

    frugal = recompute_all(BraidScheduler(rollouts=0).schedule(shapes, layout, assignment, profile))
    searched = [believed_s(share) for share in (0.3, 0.6)]
    assert packed_iteration_s(frugal, profile) > searched[0] > searched[1]


def test_other_ratios_of_replicas_are_refused() -> None:
    profile = profile_for()
    layout = layout_of(profile, shape(encoder_tp=1, segments=2))
    encoder, llm = layout.modules
    three = replace(encoder, ranks=np.ascontiguousarray(encoder.ranks[:3]))
    with pytest.raises(IncompatibleError, match="vision has dp=3, llm has dp=2"):
        BraidAssigner().assign(samples((10, [40])), Layout((three, llm), 8), profile)
