"""Braid: its layouts, whom it gives which work, its list scheduler, search and levelled work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.chunk_estimates import packed_iteration_s
from entrain_bench.balancing.listing import ListedActions
from entrain_bench.balancing.recomputation import recompute_all
from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program.assignment import check_assignment
from entrain_bench.program.layout import Layout, check_layout
from entrain_bench.program.validate import check_program
from entrain_bench.specs.job import Degrees
from entrain_bench_strategies.braid import BraidAssigner, BraidPlanner, BraidScheduler
from entrain_bench_strategies.braid.assigner import find_places, level_shares, spread_chunks
from entrain_bench_strategies.braid.planner import (
    WORST,
    ShapeWork,
    encoder_degrees,
    list_shapes,
    llm_places,
    place,
    split_layers,
)
from entrain_bench_strategies.braid.scheduler import Search, afforded_rollouts, improve, listed_replicas
from support.braid import (
    MODEL,
    Row,
    actions_of,
    assigned_in_chunks,
    layout_of,
    most_held,
    orders,
    profile_for,
    scheduled,
    shape,
    timed,
)
from support.builders import generating_model, random_samples, rngs, samples

GENERATING = generating_model()
PLAIN = BraidScheduler(llm_leads=(0,), holds=(0,))
WORK = ShapeWork(profile_for(), profile_for().samples.draw(1))

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
    assert [*encoder_degrees(job, Degrees(1, 1, 4, 2), BraidPlanner())] == [(1, 1), (1, 2), (2, 1), (1, 4), (4, 1)]
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


# As a user meets it


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


F, B = False, True


def test_long_encoder_backwards_wait_for_the_llm() -> None:
    # The lane waits for the LLM's second action; an encoder backward of 9 s is there.
    rows: list[Row] = [((0,), F, 1.0), ((1,), F, 3.0), ((0,), F, 1.0), ((0,), B, 9.0)]
    actions = actions_of(rows, [(0, 3, 0.0), (1, 2, 0.0)], of_llm=[1, 1, 1, 0])
    started, end_s, _ = scheduled(actions, [0, 1, 1, 0], [0.0, 0.0, 1.0, 9.0])
    assert (started[3] < started[2], end_s) == (True, 11.0)
    waiting, end_s, _ = scheduled(actions, [0, 1, 1, 0], [0.0, 0.0, 1.0, 9.0], held=[0, 0, 0, 1])
    assert (waiting[3] < waiting[2], end_s) == (False, 13.0)


@pytest.mark.parametrize(("room", "end"), [(2, 10.0), (3, 8.0), (4, 6.0)])
def test_activations_are_kept_where_there_is_room_beside_what_was_let_in(room: int, end: float) -> None:
    # Two pairs of 1 and 4 s, of which 2 s are recomputation, one after the other; each holds 1 byte, and 2 more if it
    # is kept. Both are let in at once, so that the first fills 4 if it is kept, and the second 3.
    rows: list[Row] = [((0,), F, 1.0), ((0,), B, 4.0), ((0,), F, 1.0), ((0,), B, 4.0)]
    edges = [(0, 1, 0.0), (1, 2, 0.0), (2, 3, 0.0)]
    actions = actions_of(rows, edges, room=room, kept=[(2, 2.0)] * 4, backward=[1, 1, 3, 3])
    _, end_s, forced = scheduled(actions, [0, 0, 1, 1], [0.0, 0.0, 1.0, 1.0])
    assert (end_s, forced) == (end, 0)


@st.composite
def random_actions(draw: st.DrawFn, most_groups: int) -> tuple[ListedActions, list[int], list[float]]:
    """Groups of forwards and their backwards over chains of lanes, some of them wide."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_lanes, num_groups = int(rng.integers(1, 4)), int(rng.integers(1, most_groups + 1))
    rows: list[Row] = []
    edges: list[tuple[int, int, float]] = []
    groups: list[int] = []
    sizes: list[int] = []
    partner: list[int] = []
    for group in range(num_groups):
        chain = []
        for _ in range(int(rng.integers(1, 3))):
            low = int(rng.integers(num_lanes))
            chain.append(range(low, int(rng.integers(low + 1, num_lanes + 1))))
        first, depth = len(rows), len(chain)
        own = rng.integers(0, 4, depth).tolist()
        rows += [([*lanes], F, float(rng.integers(1, 9))) for lanes in chain]
        rows += [([*lanes], B, float(rng.integers(1, 9))) for lanes in reversed(chain)]
        edges += [(first + step, first + step + 1, float(rng.integers(0, 3))) for step in range(2 * depth - 1)]
        groups += 2 * depth * [group]
        sizes += [*own, *reversed(own)]
        partner += [first + 2 * depth - 1 - step for step in range(2 * depth)]
    # All lanes are there.
    if max(max(lanes) for lanes, _, _ in rows) + 1 < num_lanes:
        rows.append(([num_lanes - 1], F, 1.0))
        groups.append(0)
        sizes.append(0)
        partner.append(len(rows) - 1)
    need = np.zeros((num_groups, num_lanes), np.int64)
    for (lanes, back, _), group, size in zip(rows, groups, sizes, strict=True):
        if not back:
            need[group, [*lanes]] += size
    actions = actions_of(
        rows,
        edges,
        room=int(need.max()) + int(rng.integers(0, 3)),
        sizes=sizes,
        sends=rng.integers(0, 2, len(rows)).astype(np.float64),
        receives=rng.integers(0, 2, len(rows)).astype(np.float64),
        tails=rng.integers(0, 4, len(rows)).astype(np.float64),
        backward=partner,
    )
    return actions, groups, rng.random(len(rows)).tolist()


@given(random_actions(most_groups=12), st.booleans(), st.booleans(), st.booleans())
def test_every_schedule_is_valid_within_memory_and_as_long_as_it_says(
    case: tuple[ListedActions, list[int], list[float]], alternate: bool, holds: bool, keeps: bool
) -> None:
    actions, groups, priority = case
    # All lanes have some of the LLM, the last group.
    last = [int(group == max(groups)) for group in groups]
    # What is kept saves no time here, and must block nothing.
    more = 2 * keeps * actions.size_bytes
    room = actions.room_bytes + int(more.max())
    actions = actions._replace(of_llm=np.array(last), kept_bytes=more, room_bytes=room)
    held = [int(holds and back and not llm) for back, llm in zip(actions.is_backward, last, strict=True)]
    place, end_s, forced = scheduled(actions, groups, priority, alternate, held)
    assert sorted(place) == [*range(len(place))]
    order = np.argsort(place)
    sources = np.repeat(np.arange(len(place)), np.diff(actions.user_offsets))
    assert np.all(place[sources] < place[actions.user_actions])
    assert forced == 0
    assert most_held(actions, order) <= actions.room_bytes.max()
    assert end_s == pytest.approx(timed(actions, order))
    again, _, _ = scheduled(actions, groups, priority, alternate, held)
    assert np.array_equal(place, again)


@settings(max_examples=25)
@given(random_actions(most_groups=2))
def test_no_schedule_beats_brute_force_and_most_are_near(case: tuple[ListedActions, list[int], list[float]]) -> None:
    actions, groups, priority = case
    room = actions.room_bytes.max()
    best = min(timed(actions, order) for order in orders(actions) if most_held(actions, order) <= room)
    ends = [scheduled(actions, groups, sign * np.array(priority))[1] for sign in (1, -1)]
    event("optimal" if min(ends) == pytest.approx(best) else "not optimal")
    assert min(ends) >= best - 1e-9
    # Graham's bound holds for actions of one lane without transfers; wide ones and transfers cost little more here.
    assert min(ends) <= 2 * best + len(groups)


def searched(rollouts: int, leads: tuple[int, ...] = (0, 1000)) -> list[float]:
    profile = profile_for()
    layout = layout_of(profile, shape(encoder_tp=1, segments=2))
    shapes = profile.samples.draw(32)
    assignment = assigned_in_chunks(shapes, layout, profile)
    program = BraidScheduler(rollouts=0).schedule(shapes, layout, assignment, profile)
    searches = [
        Search(replica, BraidScheduler(llm_leads=leads, holds=(0,)))
        for replica in listed_replicas(program, assignment, profile)
    ]
    improve(searches, rollouts)
    return [one.end_s for one in searches]


def test_more_rollouts_are_never_slower_and_go_to_the_slowest() -> None:
    ends = np.array([searched(rollouts) for rollouts in (0, 8, 64)])
    assert np.all(np.diff(ends.max(axis=1)) <= 0)
    assert ends[2].max() < ends[0].max()
    assert searched(64) == ends[2].tolist()
    # One rollout is one replica's.
    assert np.count_nonzero(np.array(searched(1)) != ends[0]) <= 1


def test_rollouts_take_a_tenth_of_an_iteration_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = profile_for()
    layout = layout_of(profile, shape(encoder_tp=1, segments=2))
    shapes = profile.samples.draw(32)
    assignment = BraidAssigner().assign(shapes, layout, profile)
    program = BraidScheduler(rollouts=0).schedule(shapes, layout, assignment, profile)
    searches = [Search(replica, PLAIN) for replica in listed_replicas(program, assignment, profile)]
    longest_s, most = max(one.end_s for one in searches), max(len(one.replica.numbers) for one in searches)
    assert afforded_rollouts(searches) == int(0.1 * longest_s / (0.5e-6 * most))
    # Where an action takes as long as the iteration no rollout is afforded: the first schedule stays.
    monkeypatch.setattr("entrain_bench_strategies.braid.scheduler.ACTION_S", longest_s)
    assert np.array_equal(
        BraidScheduler(rollouts=64).schedule(shapes, layout, assignment, profile).lane_actions, program.lane_actions
    )


def test_no_work_is_shared_out_evenly_or_not_at_all() -> None:
    assert level_shares(np.array([[[1.0], [1.0]]]), np.array([[0.0]]))[0] == pytest.approx([0.5, 0.5])


@given(st.integers(0, 2**32 - 1))
def test_moving_work_between_copies_never_lowers_the_busiest(seed: int) -> None:
    rng = np.random.default_rng(seed)
    base, cost = rng.random((1, 4, 2)) * 5, rng.random((1, 2)) * 10 + 0.1
    shares = level_shares(base, cost)
    busy = (base + shares[:, :, None] * cost[:, None])[0]
    assert shares.sum() == pytest.approx(1.0)
    assert np.all(shares >= 0)
    taking = shares[0] > 1e-6
    # All that take some are at the level on one of their lanes, so that whatever one gives up lifts another.
    level = busy[taking].max()
    assert busy[taking].max(axis=1) == pytest.approx(np.full(taking.sum(), level))
    assert np.all(base[0][~taking].max(axis=1) >= level - 1e-6)


@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_splits_are_as_good_as_brute_force(seed: int, lanes: int) -> None:
    """One copy of the encoder on the LLM's blocks: both split apart, and the busiest block has a stage of each."""
    layer_s = np.random.default_rng(seed).integers(1, 9, (2, 7)).astype(np.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShapeWork, "layers_s", lambda _, __, index: layer_s[index])
        splits, busiest_s = split_layers(WORK, shape(tp=1, pp=lanes))
    every_split = [tuple(np.diff([0, *cut, 7]).tolist()) for cut in combinations(range(1, 7), lanes - 1)]

    def stages_s(layers: FloatArray, split: Sequence[int]) -> FloatArray:
        return np.asarray(np.add.reduceat(layers, np.cumsum([0, *split[:-1]])))

    for layers, split in zip(layer_s, splits, strict=True):
        assert (sum(split), len(split), min(split) >= 1) == (7, lanes, True)
        assert stages_s(layers, split).max() == min(stages_s(layers, other).max() for other in every_split)
    both_s = np.sum([stages_s(*pair) for pair in zip(layer_s, splits, strict=True)], axis=0)
    assert busiest_s == pytest.approx(both_s.max())


def test_encoders_are_split_evenly_and_level_the_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    # LLM layers of 4, 2, 2 and 4 s on lanes 0, 1 and 2 of four: 4, 4 and 4 s. An encoder of 1, 1 and 2 s in two copies
    # of two stages, 2 s on each: the second copy shares lane 2 with the LLM, so it is as busy as the first.
    layer_s = [np.array([1.0, 1.0, 2.0]), np.array([4.0, 2.0, 2.0, 4.0])]
    monkeypatch.setattr(ShapeWork, "layers_s", lambda _, __, index: layer_s[index])
    wanted = shape(tp=1, pp=4, segments=2, llm_stages=3)
    assert split_layers(WORK, wanted) == ([(2, 1), (1, 2, 1)], pytest.approx(5.0))
    # On lanes 0 and 1 the LLM has 6 s each, so the first copy gets nothing.
    assert split_layers(WORK, replace(wanted, llm_stages=2)) == ([(2, 1), (2, 2)], pytest.approx(6.0))
