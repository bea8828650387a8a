"""Iterative sampling and filtering: filling by hand, the caps, what filtering gains, and the whole assigner."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.base.arrays import IntArray
from entrain_bench_strategies.omnibal import Caps, OmniBalAssigner, caps_for, fill, filtered_groups
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
    caps = Caps(int(rng.integers(5, 30)), int(rng.integers(5, 30)))
    group = filtered_groups(vision, text, caps, 0.9, rounds, seed=3)
    sizes = np.bincount(group)
    assert np.all(sizes >= 1)
    beyond = (vision > caps.vision) | (text > caps.text)
    within = (sums(group, vision) <= caps.vision) & (sums(group, text) <= caps.text)
    assert np.all(within | (sizes == 1))
    assert np.count_nonzero(~within) == np.count_nonzero(beyond)
    assert filtered_groups(vision, text, caps, 0.9, rounds, seed=3).tolist() == group.tolist()


def test_full_groups_stay_and_the_rest_is_sampled_again() -> None:
    rng = np.random.default_rng(0)
    vision, text = np.zeros(400, np.int64), rng.integers(1, 60, 400)
    caps = Caps(1, 100)
    once, often = (filtered_groups(vision, text, caps, 0.97, rounds, seed=0) for rounds in (1, 20))
    # Every group but the first round's is fuller, so that there are fewer.
    assert often.max() < once.max()
    full = [np.mean(sums(group, text) >= 97) for group in (once, often)]
    assert full[1] > 2 * full[0]
    # All that is full after one round is a group of twenty rounds.
    kept = {tuple(np.flatnonzero(once == one)) for one in np.flatnonzero(sums(once, text) >= 97)}
    assert kept <= {tuple(np.flatnonzero(often == one)) for one in range(1 + often.max())}


def test_caps_are_the_least_that_leave_groups_of_a_microbatch() -> None:
    rng = np.random.default_rng(1)
    vision, text = rng.integers(0, 200, 256), rng.integers(1, 100, 256)
    caps = caps_for(vision, text, 4, 0.97, 10, 0)
    assert 1 + filtered_groups(vision, text, caps, 0.97, 10, 0).max() <= 64
    # In the proportion of the batch.
    assert caps.vision / caps.text == pytest.approx(vision.sum() / text.sum(), rel=0.02)
    share = caps.text / (4 * text.mean())
    less = Caps(*(int(np.ceil((share - 0.06) * 4 * tokens.mean())) for tokens in (vision, text)))
    assert 1 + filtered_groups(vision, text, less, 0.97, 10, 0).max() > 64


@settings(max_examples=25, deadline=None)
@given(rngs, st.integers(1, 4))
def test_groups_go_round_the_replicas(rng: np.random.Generator, dp: int) -> None:
    shapes = random_samples(rng, 16)
    layout = chain_layout(MODEL, 1, 1, 4, dp=dp)
    vision, llm = OmniBalAssigner(200, 900).assign(shapes, layout, profile_of(tiny_job(MODEL), shapes)).modules
    assert vision.microbatch.tolist() == llm.microbatch[shapes.item_sample].tolist()
    label = llm.microbatch * dp + llm.replica
    assert np.unique(label).tolist() == [*range(1 + label.max())]


def test_without_images_only_text_is_capped() -> None:
    shapes = samples(*[(10, [])] * 8)
    layout = chain_layout(MODEL, 1, 1, 4, dp=1)
    assigned = OmniBalAssigner().assign(shapes, layout, profile_of(tiny_job(MODEL), shapes)).modules[-1]
    assert np.bincount(assigned.microbatch).tolist() == [2, 2, 2, 2]
