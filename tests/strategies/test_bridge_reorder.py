"""Intra-microbatch reordering: what it moves, what it leaves, and where it cannot."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program.assignment import check_assignment
from entrain_bench.program.layout import Layout
from entrain_bench_strategies.bridge_reorder import PatchBalance
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
