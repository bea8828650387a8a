"""Iterative sampling and filtering: filling by hand, the caps, what filtering gains, and the whole assigner."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.base.arrays import IntArray
from entrain_bench_strategies.omnibal import OmniBalAssigner, fill, filtered_groups, grouped
from support.builders import chain_layout, profile_of, random_samples, rngs, samples, tiny_job, tiny_model

MODEL = tiny_model()


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


def test_without_images_only_text_is_capped() -> None:
    shapes = samples(*[(10, [])] * 8)
    layout = chain_layout(MODEL, 1, 1, 4, dp=1)
    assigned = OmniBalAssigner().assign(shapes, layout, profile_of(tiny_job(MODEL), shapes)).modules[-1]
    assert np.bincount(assigned.microbatch).tolist() == [2, 2, 2, 2]
