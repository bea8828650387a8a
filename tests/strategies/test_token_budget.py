"""Microbatches by tokens: each rule by hand and by its definition, the caps, and what a replica gets."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.base.arrays import IntArray
from entrain_bench_strategies.token_budget import TokenBudget, balanced, first_fit, next_fit
from support.builders import chain_layout, profile_of, random_samples, samples, tiny_job, tiny_model

MODEL = tiny_model()
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
