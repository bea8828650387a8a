"""DIP's order: the search, memory and completion on random cases."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.program.assignment import same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.program.validate import check_program
from entrain_bench.simulate import place_actions
from entrain_bench_strategies.dip import DipScheduler
from entrain_bench_strategies.dip.scheduler import (
    ROOT,
    believed_s,
    best_slots,
    build_segments,
    chunk_s,
    exploration,
    learn,
    new_tree,
    propose,
)
from support.builders import (
    chain_layout,
    no_delay,
    placed,
    profile_of,
    tiny_job,
    tiny_model,
    uniform_batch,
)
from support.dip import (
    MEMORY,
    MODEL,
    colocated,
    ends_of,
    finish,
    makespan_of,
    peak_activations,
    program_of,
    random_cuts,
    seeds,
    segments,
)

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
    found = segments(layout, shapes, assignment)
    assert found.num_groups.tolist() == [count] * dp
    least = np.min([ends_of(found, np.array(order)) for order in permutations(range(count))], axis=0)
    slot = best_slots(found, rounds=100)
    assert finish(slot, layout, shapes, assignment) == pytest.approx(least.max(), rel=1e-9)


# ---- scheduler


@pytest.mark.wide
@settings(max_examples=60, deadline=None)
@given(
    seeds,
    st.integers(1, 4),
    st.integers(1, 2),
    st.integers(1, 6),
    st.integers(1, 3),
    st.floats(0.0, 6.0),
    st.integers(1, 4),
)
def test_random_cases_always_complete_within_the_memory_that_one_microbatch_needs(
    seed: int, stages: int, dp: int, count: int, most: int, microbatches_of_room: float, chunks: int
) -> None:
    layout = colocated(stages, dp, chunks=min(chunks, 4 // stages))
    shapes, assignment = random_cuts(np.random.default_rng(seed), dp, count, most)
    alone = peak_activations(layout, program_of(layout, shapes, assignment, budget_bytes=1.0)).max()
    states = MEMORY.lane_state_bytes(layout).max()
    budget = states + microbatches_of_room * alone
    program = program_of(layout, shapes, assignment, budget_bytes=budget, search_rounds=seed % 3)
    check_program(program)
    place_actions(program, np.ones(program.num_actions), no_delay(program))
    if microbatches_of_room >= 1.01:
        assert MEMORY.peak_bytes(program).max() <= budget
        event("limited")


@pytest.mark.wide
@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(1, 2), st.integers(1, 6))
def test_memory_is_never_exceeded_where_1f1b_fits(seed: int, dp: int, count: int) -> None:
    layout = chain_layout(MODEL, 2, 2, count, dp)
    shapes, _ = random_cuts(np.random.default_rng(seed), dp, count, 1)
    group = np.arange(len(shapes)) // 2
    whole = same_microbatches(MODEL, shapes, group % dp, group // dp, group // dp)
    plain = chain_program(MODEL, shapes, layout, whole, stages_behind(layout))
    # Room for what any order may hand on, and for the largest action at any time.
    besides = MEMORY.handed_bytes(plain)[1] + MEMORY.action_bytes(plain)[1].max()
    # Sizes are rounded up to whole bytes, an action each.
    budget = float((MEMORY.peak_bytes(plain) + besides).max()) + 4 * len(shapes)
    program = program_of(layout, shapes, whole, budget_bytes=budget)
    assert MEMORY.peak_bytes(program).max() <= budget


def test_chunks_shorten_fill_and_drain() -> None:
    # Two ranks, eight microbatches of 2 s forward and 4 s backward a rank: filling and draining take (P - 1) x 6 s,
    # with two chunks a rank half of it at best (arXiv:2104.04473, section 2.2).
    llm_only = tiny_model(encoder=0, llm=2)
    shapes, assignment = uniform_batch(llm_only, 8)
    ends = []
    for chunks in (1, 2):
        ranks = np.tile(np.arange(2).reshape(1, 2, 1), (1, chunks, 1))
        layout = Layout((placed(llm_only.llm, ranks),), 8)
        profile = profile_of(tiny_job(llm_only, budget_bytes=1e12), shapes)
        found = build_segments(DipScheduler().schedule(shapes, layout, assignment, profile), assignment, profile)
        even_s = np.where(found.actions.is_backward, 4.0, 2.0) / chunks
        even = replace(found, actions=found.actions._replace(duration_s=even_s))
        ends.append(float(ends_of(even, np.arange(8)).max()))
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
    layout, profile = colocated(1), profile_of(tiny_job(MODEL, budget_bytes=1e12), shapes)
    draft = program_of(layout, shapes, assignment, search_rounds=0)
    found = build_segments(draft, assignment, profile, by_module=True)
    assert found.per_group == 2
    forward = [draft.forward_actions(index)[:, 0] for index in range(2)]
    assert [found.element[own].tolist() for own in forward] == [[0, 2], [1, 3]]
    assert [found.group[own].tolist() for own in forward] == [[0, 1], [0, 1]]
    least = min(makespan_of(found, np.array(order)) for order in permutations(range(4)))
    slot = best_slots(found, rounds=100)
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
