"""What training stacks switch on: reordering by patches, length grouping, token budgets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.base.arrays import IntArray
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program.assignment import check_assignment
from entrain_bench.program.layout import Layout
from entrain_bench_strategies.practice import (
    LengthGrouped,
    PatchBalance,
    TokenBudget,
    balanced,
    even_by_modality,
    first_fit,
    next_fit,
    sorted_in_mega_batches,
)
from support.builders import chain_layout, placed, profile_of, random_samples, samples, tiny_job, tiny_model

MODEL = tiny_model()


def test_a_microbatch_step_by_hand() -> None:
    # Two replicas, two samples each a step. Step 0 has 9, 7, 2, 1: 9 -> 0, 7 -> 1, 2 -> 1, 1 -> 0. In step 1 text
    # alone: the first two go to the first replica, which is then full.
    shapes = samples((5, [900]), (5, [700]), (5, [200]), (5, [60, 40]), *[(5, [])] * 4)
    profile = profile_of(tiny_job(MODEL, global_batch=8, microbatch_size=2), shapes)
    vision, llm = PatchBalance().assign(shapes, chain_layout(MODEL, 1, 1, 2, dp=2), profile).modules
    assert llm.replica.tolist() == [0, 1, 1, 0, 0, 0, 1, 1]
    assert llm.microbatch.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert vision.replica.tolist() == [0, 1, 1, 0, 0]


def test_the_first_group_has_the_largest_sample_of_every_step_unless_loads_are_carried() -> None:
    shapes = samples((5, [40]), (5, [900]), (5, [800]), (5, [40]))
    profile = profile_of(tiny_job(MODEL, global_batch=4, microbatch_size=1), shapes)
    layout = chain_layout(MODEL, 1, 1, 2, dp=2)
    assert PatchBalance().assign(shapes, layout, profile).modules[-1].replica.tolist() == [1, 0, 0, 1]
    assert PatchBalance(carry=True).assign(shapes, layout, profile).modules[-1].replica.tolist() == [1, 0, 1, 0]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(2, 4), (4, 2), (2, 3), (1, 4), (2, 2)]))
def test_modules_of_any_dp_hold_neighbouring_groups_of_the_same_samples(seed: int, dps: tuple[int, int]) -> None:
    encoder_dp, llm_dp = dps
    shapes = random_samples(np.random.default_rng(seed), 48)
    vision, llm = MODEL.modules
    ranks = [np.arange(encoder_dp)[:, None, None], encoder_dp + np.arange(llm_dp)[:, None, None]]
    layout = Layout((placed(vision, ranks[0]), placed(llm, ranks[1])), 48 // (12 // llm_dp * llm_dp))
    size = 12 // llm_dp
    profile = profile_of(tiny_job(MODEL, global_batch=48, microbatch_size=size), shapes)
    assignment = PatchBalance().assign(shapes, layout, profile)
    check_assignment(assignment, MODEL, layout, shapes)
    of_item, of_sample = assignment.modules
    # As many samples on every replica in every step, none in another step.
    step = np.arange(48) // 12
    assert np.array_equal(of_sample.microbatch, step)
    assert np.bincount(of_sample.replica * 4 + step, minlength=4 * llm_dp).tolist() == [size] * (4 * llm_dp)
    # Either DP's replicas are unions of the same groups: places of items and samples fit together.
    owner = shapes.item_sample
    low = of_sample.replica[owner] * encoder_dp // llm_dp
    high = -(-(of_sample.replica[owner] + 1) * encoder_dp // llm_dp)
    assert np.all((low <= of_item.replica) & (of_item.replica < high))


def test_groups_that_a_step_cannot_fill_are_refused() -> None:
    vision, llm = MODEL.modules
    layout = Layout((placed(vision, np.arange(3)[:, None, None]), placed(llm, 3 + np.arange(2)[:, None, None])), 4)
    shapes = samples(*[(5, [40])] * 16)
    profile = profile_of(tiny_job(MODEL, global_batch=16, microbatch_size=2), shapes)
    with pytest.raises(IncompatibleError, match=r"the 4 samples of a microbatch step .* do not divide among 6 groups"):
        PatchBalance().assign(shapes, layout, profile)


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


def test_length_grouped_microbatches_go_round_the_replicas() -> None:
    shapes = samples(*[(tokens, []) for tokens in (1, 2, 3, 4, 5, 6, 7, 8)])
    profile = profile_of(tiny_job(MODEL, global_batch=8, microbatch_size=2), shapes)
    labels = LengthGrouped().assign(shapes, chain_layout(MODEL, 1, 1, 2, dp=2), profile).modules[-1]
    # 8 7 | 6 5 | 4 3 | 2 1 on replicas 0 1 0 1.
    assert labels.replica.tolist() == [1, 1, 0, 0, 1, 1, 0, 0]
    assert labels.microbatch.tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    # One mega-batch of a replica is half of the batch: each half is sorted alone, so its microbatches are neither.
    parts = LengthGrouped(mega_batches=1).assign(shapes, chain_layout(MODEL, 1, 1, 2, dp=2), profile).modules[-1]
    halves = [shapes.llm_tokens[parts.microbatch == half] for half in (0, 1)]
    assert [len(half) for half in halves] == [4, 4]
    assert {*halves[0].tolist()} != {8, 7, 6, 5}
    assert halves[0].max() == 8


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


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=40).map(np.array)


def falling(tokens: IntArray) -> IntArray:
    return np.argsort(-tokens, kind="stable")


@settings(max_examples=80, deadline=None)
@given(lengths, st.integers(1, 60))
def test_both_fits_by_their_definition(tokens: IntArray, budget: int) -> None:
    for order in (np.arange(len(tokens)), falling(tokens)):
        first, following = first_fit(tokens, order, budget), next_fit(tokens, order, budget)
        load: list[int] = []
        for sample in order.tolist():
            size = int(tokens[sample])
            fitting = [one for one, used in enumerate(load) if used + size <= budget]
            expected = fitting[0] if fitting else len(load)
            assert first[sample] == expected
            load = [*load, 0] if expected == len(load) else load
            load[expected] += size
        for chosen in (first, following):
            held, counts = np.bincount(chosen, weights=tokens), np.bincount(chosen)
            assert np.all((held <= budget) | (counts == 1))
            assert np.all(counts >= 1)
        # Two neighbours of next fit together exceed the budget, hence at most twice what is needed.
        used = np.bincount(following, weights=tokens)
        assert np.all(used[1:] + used[:-1] > budget)


@settings(max_examples=80, deadline=None)
@given(lengths, st.integers(40, 60), st.integers(1, 50))
def test_first_fit_by_falling_length_is_a_greedy_knapsack_in_every_buffer(
    tokens: IntArray, budget: int, buffer: int
) -> None:
    # LLaMA-Factory fills one pack at a time, always with the longest sample that still fits.
    packs: list[list[int]] = []
    for start in range(0, len(tokens), buffer):
        left = sorted(tokens[start : start + buffer].tolist())
        while left:
            packs.append([])
            while fitting := [size for size in left if size <= budget - sum(packs[-1])]:
                packs[-1].append(fitting[-1])
                left.remove(fitting[-1])
    shapes = samples(*[(size, []) for size in tokens.tolist()])
    profile = profile_of(tiny_job(MODEL), shapes)
    rule = TokenBudget(max_tokens=budget, buffer=buffer)
    labels = rule.assign(shapes, chain_layout(MODEL, 1, 1, 1, dp=1), profile).modules[-1]
    found = [tokens[labels.microbatch == one].tolist() for one in range(1 + labels.microbatch.max())]
    assert [sorted(pack, reverse=True) for pack in found] == packs


def test_first_fit_takes_samples_in_order_of_arrival_and_buffers_open_packs_of_their_own() -> None:
    shapes = samples(*[(tokens, []) for tokens in (6, 7, 4, 3, 2)])
    profile = profile_of(tiny_job(MODEL), shapes)
    layout = chain_layout(MODEL, 1, 1, 3, dp=1)
    for buffer, expected in ((None, [0, 1, 0, 1, 2]), (3, [0, 1, 0, 2, 2]), (1, [0, 1, 2, 3, 4])):
        rule = TokenBudget("first_fit", max_tokens=10, buffer=buffer)
        assert rule.assign(shapes, layout, profile).modules[-1].microbatch.tolist() == expected


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=8, max_size=40).map(np.array), st.integers(1, 4), st.integers(5, 200))
def test_replicas_of_karmarkar_karp_have_equally_many_samples_and_microbatches(
    tokens: IntArray, num_replicas: int, budget: int
) -> None:
    replica, microbatch = balanced(tokens, num_replicas, budget)
    sizes = np.bincount(replica, minlength=num_replicas)
    assert sizes.max() <= -(-len(tokens) // num_replicas)
    counts = [np.unique(microbatch[replica == one]).tolist() for one in range(num_replicas)]
    assert len({len(count) for count in counts}) == 1
    assert counts[0] == [*range(len(counts[0]))]
    load = np.bincount(replica, weights=tokens, minlength=num_replicas)
    assert len(counts[0]) == min(-(-int(load.max()) // budget), int(sizes.min()))


def test_microbatches_go_round_the_replicas() -> None:
    shapes = samples(*[(10, [])] * 6)
    layout = chain_layout(MODEL, 1, 1, 2, dp=2)
    profile = profile_of(tiny_job(MODEL), shapes)
    assigned = TokenBudget("next_fit", max_tokens=20).assign(shapes, layout, profile).modules[-1]
    assert assigned.replica.tolist() == [0, 0, 1, 1, 0, 0]
    assert assigned.microbatch.tolist() == [0, 0, 0, 0, 1, 1]


def test_the_default_budget_is_what_a_microbatch_has_on_average() -> None:
    shapes = random_samples(np.random.default_rng(0), 32)
    layout = chain_layout(MODEL, 1, 1, 8, dp=2)
    job = tiny_job(MODEL)
    found = TokenBudget().assign(shapes, layout, profile_of(job, shapes)).modules[-1]
    tokens = shapes.llm_tokens
    asked = -(-int(tokens.sum()) * job.microbatch_size // len(tokens))
    held = np.bincount(found.microbatch * 2 + found.replica, weights=tokens)
    assert np.all((held <= asked) | (held <= tokens.max()))
    given_budget = TokenBudget(max_tokens=asked).assign(shapes, layout, profile_of(job, shapes)).modules[-1]
    assert given_budget.microbatch.tolist() == found.microbatch.tolist()


def test_encoder_tokens_count_where_asked() -> None:
    # 10 + 100 LLM tokens and 400 in the encoder, or 110 text tokens: alike for the LLM alone.
    shapes = samples((10, [400]), (110, []), (10, [400]), (110, []))
    layout, profile = chain_layout(MODEL, 1, 1, 2), profile_of(tiny_job(MODEL), shapes)
    by_llm, by_all = (
        TokenBudget("next_fit", 620, counted).assign(shapes, layout, profile).modules[-1].microbatch.tolist()
        for counted in ("llm", "all")
    )
    assert by_llm == [0, 0, 0, 0]
    assert by_all == [0, 0, 1, 1]
