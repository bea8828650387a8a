"""OmniBal: groups under caps, and near partitions."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.interface import Strategy
from entrain_bench.balancing.planning import average_layer_s, partition_layers, place_cuts, stage_sums
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.schedules import OneForwardOneBackward
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.program.layout import Layout
from entrain_bench.specs.job import Degrees, LayoutRequest
from entrain_bench_strategies.omnibal import (
    MOST_RATED,
    OmniBalAssigner,
    OmniBalPlanner,
    fill,
    filtered_groups,
    grouped,
    near_partitions,
)
from support.builders import chain_layout, profile_of, random_samples, rngs, tiny_job, tiny_model

MODEL = tiny_model()
CHAIN = tiny_model(encoder=4, llm=4)


def test_a_group_ends_where_either_cap_would_be_exceeded() -> None:
    vision, text = np.array([4, 4, 4, 0, 0, 0]), np.array([1, 1, 1, 6, 5, 5])
    # 8 of 8 in the encoder | one image, then 7 of 10 in the LLM | 5 5
    assert fill(vision, text, 8, 10).tolist() == [0, 0, 1, 1, 2, 2]


def sums(group: IntArray, tokens: IntArray) -> IntArray:
    return np.bincount(group, weights=tokens).astype(np.int64)


@settings(max_examples=80, deadline=None)
@given(rngs, st.integers(1, 40), st.integers(1, 6))
def test_caps_hold_but_for_samples_beyond_them(rng: np.random.Generator, count: int, rounds: int) -> None:
    vision, text = rng.integers(0, 12, count), rng.integers(1, 12, count)
    caps = int(rng.integers(5, 30)), int(rng.integers(5, 30))
    group = filtered_groups(np.stack([vision, text]), caps, rounds)
    sizes = np.bincount(group)
    assert np.all(sizes >= 1)
    beyond = (vision > caps[0]) | (text > caps[1])
    within = (sums(group, vision) <= caps[0]) & (sums(group, text) <= caps[1])
    assert np.all(within | (sizes == 1))
    assert np.count_nonzero(~within) == np.count_nonzero(beyond)


def test_full_groups_stay_and_the_rest_is_sampled_again() -> None:
    rng = np.random.default_rng(0)
    vision, text = np.zeros(400, np.int64), rng.integers(1, 60, 400)
    once, often = (filtered_groups(np.stack([vision, text]), (1, 100), rounds) for rounds in (1, 20))
    # Every group but the first round's is fuller, so that there are fewer.
    assert often.max() < once.max()
    full = [np.mean(sums(group, text) >= 97) for group in (once, often)]
    assert full[1] > 2 * full[0]
    # All that is full after one round is a group of twenty rounds.
    kept = {tuple(np.flatnonzero(once == one)) for one in np.flatnonzero(sums(once, text) >= 97)}
    assert kept <= {tuple(np.flatnonzero(often == one)) for one in range(1 + often.max())}


def test_caps_grow_until_groups_are_of_a_microbatch() -> None:
    rng = np.random.default_rng(1)
    tokens = np.stack([rng.integers(0, 200, 256), rng.integers(1, 100, 256)])
    assert 1 + grouped(tokens, 4, 10).max() <= 64
    least = int(np.ceil(4 * tokens[0].mean())), int(np.ceil(4 * tokens[1].mean()))
    assert 1 + filtered_groups(tokens, least, 10).max() > 64


@settings(max_examples=25, deadline=None)
@given(rngs, st.integers(1, 4))
def test_groups_go_round_the_replicas(rng: np.random.Generator, dp: int) -> None:
    shapes = random_samples(rng, 16)
    layout = chain_layout(MODEL, 1, 1, 4, dp=dp)
    vision, llm = OmniBalAssigner().assign(shapes, layout, profile_of(tiny_job(MODEL), shapes)).modules
    assert vision.microbatch.tolist() == llm.microbatch[shapes.item_sample].tolist()
    label = llm.microbatch * dp + llm.replica
    assert np.unique(label).tolist() == [*range(1 + label.max())]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=8).map(lambda own: np.array(own, np.float64)), st.integers(1, 4)
)
@example(np.array([1.0, 3.0, 3.0, 1.0, 3.0]), 3)
def test_near_partitions_are_all_with_two_cuts_moved(layer_s: FloatArray, stages: int) -> None:
    stages = min(stages, len(layer_s))
    found = near_partitions(layer_s, stages, radius=1)
    best = np.cumsum(partition_layers(layer_s, stages))[:-1]
    expected = set()
    for cuts in combinations(range(1, len(layer_s)), stages - 1):
        moved = np.array(cuts, np.int64) - best
        if np.abs(moved).max(initial=0) <= 1 and np.count_nonzero(moved) <= 2:
            expected.add(tuple(np.diff([0, *cuts, len(layer_s)]).tolist()))
    assert {*found} == expected
    spread = [decisive(float(stage_sums(layer_s, layers).var())) for layers in found]
    assert np.all(np.diff(spread) >= -1e-9)


def test_the_most_even_partition_may_not_have_the_fastest_slowest_stage() -> None:
    # Slowest 9 either way; 9 7 8 is more even than 9 9 6.
    layer_s = np.array([9.0, 7.0, 2.0, 6.0])
    assert near_partitions(layer_s, 3, radius=1)[0] == (1, 1, 2)
    assert near_partitions(layer_s, 3, radius=0) == [partition_layers(layer_s, 3)]


def planned(planner: OmniBalPlanner, memory: str = "stage") -> tuple[Layout, Profile]:
    shapes = random_samples(np.random.default_rng(0), 64)
    job = tiny_job(CHAIN, request=LayoutRequest(tp=1, cp=1, pp=4, dp=2))
    profile = profile_of(job, shapes)
    scheduler = OneForwardOneBackward(memory=memory)
    return Strategy("omnibal", planner, OmniBalAssigner(), scheduler).plan(profile), profile


def test_the_most_even_partitions_are_rated() -> None:
    _, profile = planned(OmniBalPlanner(num_trials=1))
    samples = profile.samples.draw(16)
    rated = [draft.place().layout for draft in OmniBalPlanner()._drafts(profile, samples, True)]
    chain_s = np.concatenate(average_layer_s(profile, samples, 1, 1))
    near = near_partitions(chain_s, 4, radius=2)
    assert len(rated) == MOST_RATED < len(near)
    job = profile.job
    expected = [place_cuts(job, Degrees(1, 1, 4, 2), layers, (False, False)) for layers in near[:MOST_RATED]]
    assert [layout.describe() for layout in rated] == [layout.describe() for layout in expected]
