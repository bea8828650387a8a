"""DIP: the search, memory, sub-microbatches, chunks a rank, and generators."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.interface import Scheduler, Strategy
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.costs.bound import lower_bound_s
from entrain_bench.costs.memory import Memory
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.program.validate import check_program
from entrain_bench.simulate import Simulator
from entrain_bench.specs.job import Degrees, LayoutRequest
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench_strategies.dip import (
    ROOT,
    DipAssigner,
    DipPlanner,
    DipScheduler,
    believed_s,
    best_slots,
    chunk_s,
    chunks_per_rank,
    efficient_items,
    exploration,
    learn,
    new_tree,
    propose,
    sub_microbatches,
)
from entrain_bench_strategies.mdp import OptimusScheduler
from support.braid import scheduled as scheduled_actions
from support.builders import (
    labels,
    placed,
    profile_of,
    random_samples,
    samples,
    tiny_cluster,
    tiny_job,
    tiny_model,
    uniform_batch,
)
from support.dip import (
    MEMORY,
    MODEL,
    colocated,
    end_of,
    finish,
    makespan_of,
    program_of,
    random_cuts,
    replicas_of,
    seeds,
)
from support.disttrain import generating
from support.interleaver import Reference, random_actions

# A generated image takes 512 tokens, whatever the size of the one that is encoded.
DRAWING = generating(item_tokens=512)

# ---- search


@pytest.mark.parametrize("count", range(6))
def test_the_tree_sees_every_order_once_it_is_finished(count: int) -> None:
    rng = np.random.default_rng(count)
    scores = {order: float(rng.random()) for order in permutations(range(count))}
    tree = new_tree(count, exploration(1000))
    seen, best = [], []
    while not tree.finished[ROOT]:
        propose(tree, rng)
        seen.append(tuple(tree.proposed.tolist()))
        assert learn(tree, scores[seen[-1]]) == (scores[seen[-1]] < min(best, default=np.inf))
        best.append(tree.scores[0])
    if count:
        assert seen[0] == tuple(range(count)), "the order of arrival comes first"
        assert set(seen) == set(scores)
        assert scores[tuple(tree.order.tolist())] == best[-1] == min(scores.values())
        propose(tree, rng)
        assert tree.proposed.tolist() == tree.order.tolist(), "nothing else is left to try"


def test_the_tree_beats_as_many_random_orders_where_the_beginning_matters() -> None:
    # Least where the elements fall; early places count most, as the first microbatches of a pipeline do.
    weight = 0.8 ** np.arange(24)
    found, drawn = [], []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        value = rng.random(24)
        tree = new_tree(24, exploration(60))
        for _ in range(60):
            propose(tree, rng)
            learn(tree, float(value[tree.proposed] @ weight))
        found.append(tree.scores[0])
        drawn.append(min(float(value[rng.permutation(24)] @ weight) for _ in range(60)))
    assert np.mean(found) < np.mean(drawn)


@pytest.mark.wide
@settings(max_examples=15, deadline=None)
@given(seeds, st.integers(1, 3), st.integers(1, 2), st.integers(1, 4))
def test_the_search_finds_the_best_order_of_few_microbatches(seed: int, stages: int, dp: int, count: int) -> None:
    layout = colocated(stages, dp)
    shapes, assignment = random_cuts(np.random.default_rng(seed), dp, count, 2)
    draft, replicas = replicas_of(layout, shapes, assignment)
    assert [1 + replica.group.max() for replica in replicas] == [count] * dp
    orders = [np.array(order) for order in permutations(range(count))]
    least = [min(end_of(replica, order) for order in orders) for replica in replicas]
    slot = best_slots(draft, replicas, rounds=100)
    assert finish(slot, layout, shapes, assignment) == pytest.approx(max(least), rel=1e-9)


# ---- scheduler


def test_chunks_shorten_fill_and_drain() -> None:
    # Two ranks, eight microbatches of 2 s forward and 4 s backward a rank: filling and draining take (P - 1) x 6 s,
    # with two chunks a rank half of it at best (arXiv:2104.04473, section 2.2).
    llm_only = tiny_model(encoder=0, llm=2)
    shapes, assignment = uniform_batch(llm_only, 8)
    ends = []
    for chunks in (1, 2):
        ranks = np.tile(np.arange(2).reshape(1, 2, 1), (1, chunks, 1))
        layout = Layout((placed(llm_only.llm, ranks),), 8)
        (found,) = replicas_of(layout, shapes, assignment, llm_only)[1]
        even_s = np.where(found.actions.is_backward, 4.0, 2.0) / chunks
        ends.append(end_of(replace(found, actions=found.actions._replace(duration_s=even_s)), np.arange(8)))
    assert ends == [8 * 6 + 6, 8 * 6 + 3]


def test_memory_is_bought_back_and_never_exceeded() -> None:
    layout = colocated(2)
    shapes, assignment = uniform_batch(MODEL, 12)
    frugal, free = (program_of(layout, shapes, assignment, memory="greedy", budget_bytes=b) for b in (1.0, 1e12))
    assert [int(own.min()) for own in frugal.remade] == [1, 1], "nothing fits"
    assert free.remade == ()
    low, high = (float(MEMORY.peak_bytes(program).max()) for program in (frugal, free))
    profile = profile_of(tiny_job(MODEL, budget_bytes=1e12), shapes)
    plain = program_of(layout, shapes, assignment)
    assert believed_s(profile, free) <= believed_s(profile, plain) * (1 + 1e-9), "with memory it costs nothing"
    budget = low + 0.5 * (high - low)
    program = program_of(layout, shapes, assignment, memory="greedy", budget_bytes=budget)
    assert MEMORY.peak_bytes(program).max() <= budget
    assert 0 < sum(int(own.sum()) for own in program.remade) < sum(int(own.sum()) for own in frugal.remade)
    assert believed_s(profile, free) <= believed_s(profile, program) < believed_s(profile, frugal)


def test_modalities_have_priorities_of_their_own() -> None:
    # Two microbatches on one lane. In the order (second image, first image, first LLM, second LLM) the second image
    # comes first although its microbatch's LLM part is last.
    shapes, assignment = uniform_batch(MODEL, 2)
    layout = colocated(1)
    draft, replicas = replicas_of(layout, shapes, assignment)
    assert [replicas[0].group[draft.forward_actions(index)[:, 0]].tolist() for index in range(2)] == [[0, 1], [0, 1]]
    least = min(makespan_of(replicas[0], np.array(order), draft.module) for order in permutations(range(4)))
    slot = best_slots(draft, replicas, rounds=100, by_module=True)
    assert finish(slot, layout, shapes, assignment) == pytest.approx(least, rel=1e-9)


def test_the_search_never_believes_itself_worse_and_repeats_itself() -> None:
    layout = colocated(3, dp=2)
    shapes, assignment = random_cuts(np.random.default_rng(3), 2, 6, 2)
    profile = profile_of(tiny_job(MODEL), shapes)
    plain, found, again = (program_of(layout, shapes, assignment, search_rounds=rounds) for rounds in (0, 20, 20))
    assert believed_s(profile, found) < believed_s(profile, plain)
    assert np.array_equal(found.lane_actions, again.lane_actions)


def test_believed_stage_times_add_up_to_the_estimates_and_recomputation_costs_a_forward() -> None:
    shapes, assignment = uniform_batch(MODEL, 4)
    llm = MODEL.llm
    profile = profile_of(tiny_job(MODEL), shapes)
    chunks = program_of(colocated(2), shapes, assignment).chunks[-1]
    for recompute, factor in ((False, 2.0), (True, 3.0)):
        forward, backward = chunk_s(llm, placed(llm, [[[0], [1]]], recompute=recompute), shapes, chunks, profile)
        assert forward.sum() == pytest.approx(profile.estimates.units(llm, shapes, 1, 1).sum())
        assert backward == pytest.approx(factor * forward)


# ---- assigner


@given(seeds, st.integers(1, 5), st.integers(1, 3))
def test_sub_microbatches_are_no_larger_than_asked_and_as_few_as_can_be(seed: int, most: int, dp: int) -> None:
    rng = np.random.default_rng(seed)
    group = np.sort(rng.integers(0, 9, 30))
    place = sub_microbatches(group % dp, group // dp, most)
    for r in range(dp):
        mine = place[group % dp == r]
        assert np.unique(mine).tolist() == list(range(len(np.unique(mine)))), "consecutive"
        assert np.all(np.diff(mine) >= 0), "in arrival order"
    for g in np.unique(group):
        sizes = np.unique(place[group == g], return_counts=True)[1]
        assert sizes.max() <= most
        assert sizes.max() - sizes.min() <= 1
        assert len(sizes) == -(-np.sum(group == g) // most)
    cuts = {(g % dp, p) for g, p in zip(group, place, strict=True)}
    assert len(cuts) == sum(len(np.unique(place[group == g])) for g in np.unique(group)), "cuts do not cross"


@pytest.mark.wide
@pytest.mark.parametrize(
    ("each", "launch_s"), [*product([1, 40, 300, 5000], [1e-6, 1e-3]), (131_072, 1e3), (200_000, 1e3)]
)
def test_efficient_items_is_the_smallest_that_reaches_the_share_of_the_peak(each: int, launch_s: float) -> None:
    job = tiny_job(MODEL, tiny_cluster(launch_s=launch_s))
    profile = profile_of(job, samples((10, [each])))
    module = MODEL.encoders[0]
    found = efficient_items(profile, module, samples((10, [each, each])), 1, 1)

    def rate(items: int) -> float:
        times = profile.layers.measure(module, np.full(items, each), 1, 1)
        return items / sum(float(times[kind].total_s[0]) for kind in module.layer_kind)

    peak = max(rate(2**i) for i in range(max(1, (131_072 // each).bit_length())))
    assert rate(found) >= 0.95 * peak
    if launch_s >= 1e-3:
        assert all(rate(n) < 0.95 * peak for n in range(1, found))


# ---- planner


def test_chunks_per_rank_follow_the_latencies() -> None:
    model = tiny_model(encoder=6, llm=18)
    shapes = samples((20, [1600, 1600]), (20, [1600]))
    profile = profile_of(tiny_job(model, microbatch_size=3), shapes)
    degrees = Degrees(1, 1, 1, 1)
    vision, llm = model.modules
    times = []
    for module, count, tokens in ((vision, efficient_items(profile, vision, shapes, 1, 1), 1600), (llm, 3, None)):
        each = tokens or round(float(shapes.llm_tokens.mean()))
        measured = profile.layers.measure(module, np.full(count, each), 1, 1)
        times.append(sum(float(measured[kind].total_s[0]) for kind in module.layer_kind))
    ratio = int(times[1] / times[0])
    assert 1 < ratio < 20
    assert chunks_per_rank(profile, shapes, degrees) == (1, ratio)
    # Every stage of every chunk has a layer; a module without items does not count.
    assert chunks_per_rank(profile, shapes, Degrees(1, 1, 8, 1)) == (1, min(ratio, 2))
    assert chunks_per_rank(profile, samples((2000, [])), degrees) == (1, 1)


@pytest.mark.wide
def test_the_planner_keeps_one_chunk_where_the_order_takes_no_more() -> None:
    shapes = samples(*[(4000, [40])] * 8)
    job = tiny_job(tiny_model(encoder=2, llm=14), request=LayoutRequest(tp=1, cp=1, dp=4))

    def stages(chunks: str, scheduler: Scheduler) -> list[int]:
        strategy = Strategy("dip", DipPlanner(chunks=chunks), DipAssigner(), scheduler)
        return [module.pp for module in strategy.plan(profile_of(job, shapes)).modules]

    dip, optimus = DipScheduler(search_rounds=0), OptimusScheduler()
    assert stages("rule", dip) == [2, 16]
    assert stages("auto", dip) == [2, 16]
    assert stages("one", dip) == stages("one", optimus) == stages("auto", optimus) == [2, 2]
    with pytest.raises(IncompatibleError, match="a rank holds 8 stages of llm"):
        stages("rule", optimus)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_random_actions_run_like_the_reference(seed: int) -> None:
    case = random_actions(np.random.default_rng(seed))
    place, end_s, forced = scheduled_actions(*case)
    expected = Reference(case)
    for lane in np.unique(case.actions.lanes):
        mine = np.flatnonzero(case.actions.lanes == lane)
        assert np.argsort(place[mine]).tolist() == np.argsort(expected.slot[mine]).tolist()
    assert (end_s, forced) == (expected.end.max(), expected.forced)
    event("forced" if forced else "not forced")


VISION, LLM, OUT = DRAWING.modules


scheduled = partial(program_of, model=DRAWING, priorities="modality")


def cut_by(shapes: SampleShapes, dp: int, most: tuple[int, int]) -> Assignment:
    """Microbatches of two samples, cut for the encoder and for the generator by different sizes."""
    group = np.arange(len(shapes)) // 2
    owner = group[shapes.item_sample]
    vision, out = (sub_microbatches(owner % dp, owner // dp, each) for each in most)
    return Assignment((labels(owner % dp, vision), labels(group % dp, group // dp), labels(owner % dp, out)))


def test_encoder_and_generator_cut_the_items_by_sizes_of_their_own() -> None:
    job = tiny_job(DRAWING, tiny_cluster(launch_s=1e-6), microbatch_size=2)
    # Small images need company; a generated one is long enough by itself.
    shapes = samples(*[(10, [64, 64, 64, 64])] * 4)
    profile = profile_of(job, shapes)
    layout = colocated(1, model=DRAWING)
    most = [efficient_items(profile, module, shapes, 1, 1) for module in (VISION, OUT)]
    assert most[0] > most[1] >= 1
    vision, llm, out = DipAssigner().assign(shapes, layout, profile).modules
    assert llm.microbatch.tolist() == [0, 0, 1, 1]
    for found, size in ((vision, most[0]), (out, most[1])):
        assert found.microbatch.max() + 1 == 2 * -(-8 // size)
        # The second microbatch's items begin a sub-microbatch.
        assert found.microbatch[7] < found.microbatch[8]


def test_a_microbatch_is_one_group_with_what_encodes_and_generates_its_items() -> None:
    shapes = samples((10, [40, 40]), (10, [40]), (10, []), (10, [40]), (10, []), (10, []))
    layout, assignment = colocated(2, model=DRAWING), cut_by(shapes, 1, (1, 2))
    program, (found,) = replicas_of(layout, shapes, assignment, DRAWING)
    # Groups come by the LLM microbatch that they serve: three, the last one of text alone.
    groups = [found.group[program.forward_actions(index)][:, 0] for index in range(3)]
    assert [each.tolist() for each in groups] == [[0, 0, 0, 1], [0, 1, 2], [0, 0, 1]]
    ranks = [found.rank[program.forward_actions(index)][:, 0] for index in range(3)]
    assert ranks[0][:3].max() < ranks[1][0] < ranks[2][:2].min()
    backs = [found.rank[program.backward_actions(index)][:, 0] for index in range(3)]
    assert backs[2][:2].max() < backs[1][0] < backs[0][:3].min()


@pytest.mark.wide
@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 4),
    st.integers(1, 2),
    st.integers(1, 4),
    st.integers(1, 2),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from(["module", "greedy"]),
    st.sampled_from([0.0, 0.5, 1.1, 2.0]),
)
def test_random_batches_run_above_the_bound_and_within_memory(
    seed: int, stages: int, dp: int, count: int, turns: int, most: tuple[int, int], memory: str, room: float
) -> None:
    layout = colocated(stages, dp, chunks=min(turns, 4 // stages), model=DRAWING)
    shapes = random_samples(np.random.default_rng(seed), 2 * dp * count)
    assignment = cut_by(shapes, dp, most)
    costs = Memory(DRAWING)
    alone = costs.peak_bytes(scheduled(layout, shapes, assignment, budget_bytes=1.0)).max()
    budget = max(1.0, room * alone)
    program = scheduled(layout, shapes, assignment, budget_bytes=budget, memory=memory, search_rounds=seed % 3)
    check_program(program)
    assert room < 1 or costs.peak_bytes(program).max() <= budget
    truth = CostTruth(DRAWING, tiny_cluster(1, 8))
    timeline = Simulator(truth, 1e15).execute(program)
    assert lower_bound_s(truth, layout, shapes) <= timeline.iteration_time_s * (1 + 1e-9)
