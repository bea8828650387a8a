"""Length-grouped samplers: orders by hand, and against the definition of what they group."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench_strategies.length_grouped import LengthGrouped, even_by_modality, sorted_in_mega_batches
from support.builders import chain_layout, profile_of, random_samples, samples, tiny_job, tiny_model

MODEL = tiny_model()


def test_mega_batches_are_sorted_apart_and_the_longest_sample_comes_first() -> None:
    length = np.array([3.0, 5.0, 4.0, 9.0, 1.0, 9.0])
    # Mega-batches 0 1 2 and 3 4 5: 1 2 0 and 3 5 4 (equal lengths as they come); 3 is longest and changes with 1.
    assert sorted_in_mega_batches(np.arange(6), length, 3).tolist() == [3, 2, 0, 1, 5, 4]
    # One mega-batch: nothing but sorted.
    assert sorted_in_mega_batches(np.arange(6), length, 100).tolist() == [3, 5, 1, 2, 0, 4]


def test_microbatches_of_one_modality_with_even_sums_by_hand() -> None:
    length = np.array([8.0, 7.0, 2.0, 1.0, 5.0, 3.0, 6.0])
    has_items = np.array([True, True, True, True, False, False, True])
    # With items 0 1 2 3 (6 is over): 8 -> first, 7 -> second, 2 -> second, 1 -> first. Text 4 5 fills one microbatch.
    order = even_by_modality(np.arange(7), length, has_items, 2)
    assert order.tolist() == [0, 3, 1, 2, 4, 5, 6]
    # Samples over come together, by arrival, wherever the permutation had them.
    assert even_by_modality(np.array([5, 0, 1]), length, has_items, 3).tolist() == [0, 1, 5]


def test_microbatches_go_round_the_replicas() -> None:
    shapes = samples(*[(tokens, []) for tokens in (1, 2, 3, 4, 5, 6, 7, 8)])
    profile = profile_of(tiny_job(MODEL, global_batch=8, microbatch_size=2), shapes)
    labels = LengthGrouped().assign(shapes, chain_layout(MODEL, 1, 1, 2, dp=2), profile).modules[-1]
    # 8 7 | 6 5 | 4 3 | 2 1 on replicas 0 1 0 1.
    assert labels.replica.tolist() == [1, 1, 0, 0, 1, 1, 0, 0]
    assert labels.microbatch.tolist() == [1, 1, 1, 1, 0, 0, 0, 0]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["length", "modality_length"]))
def test_every_sample_once_and_the_order_of_arrival_does_not_matter(seed: int, rule: str) -> None:
    rng = np.random.default_rng(seed)
    shapes = random_samples(rng, 24)
    layout = chain_layout(MODEL, 1, 1, 6, dp=2)
    profile = profile_of(tiny_job(MODEL, global_batch=24, microbatch_size=2), shapes)
    sampler = LengthGrouped(rule)
    labels = sampler.assign(shapes, layout, profile).modules[-1]
    assert np.bincount(labels.replica * 6 + labels.microbatch).tolist() == [2] * 12
    if rule == "length":
        other = rng.permutation(24)
        moved = sampler.assign(shapes.take(other), layout, profile).modules[-1]
        assert np.array_equal(moved.replica, labels.replica[other])
        assert np.array_equal(moved.microbatch, labels.microbatch[other])
