"""Algorithm 3 of Entrain without deferral: every part against brute force, and the whole assigner."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench_strategies.entrain.assigner import (
    EntrainAssigner,
    assign_microbatches,
    assign_replicas,
    effective_microbatches,
    stratified_order,
)
from support.builders import chain_layout, profile_of, random_samples, samples, tiny_job, tiny_model

work = st.floats(0.0, 10.0, allow_nan=False).map(lambda value: round(value, 3))
positive_work = st.floats(0.01, 10.0, allow_nan=False).map(lambda value: round(value, 3))


# a. Replicas


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 4), st.integers(1, 8), st.data())
def test_replicas_get_equally_many_samples_by_the_greedy_rule(dp: int, each: int, data: st.DataObject) -> None:
    llm = np.array(data.draw(st.lists(work, min_size=dp * each, max_size=dp * each)))
    order = np.array(data.draw(st.permutations(range(dp * each))))
    replica = assign_replicas(order, llm, dp)
    assert np.bincount(replica, minlength=dp).tolist() == [each] * dp
    load, count = [0.0] * dp, [0] * dp
    for sample in order.tolist():
        open_replicas = [r for r in range(dp) if count[r] < each]
        chosen = int(replica[sample])
        assert chosen in open_replicas
        assert chosen == min(open_replicas, key=lambda r: load[r]), "of equally loaded ones the first"
        load[chosen] += float(llm[sample])
        count[chosen] += 1


# b. Effective microbatches


@pytest.mark.parametrize(
    ("encoder", "limit", "expected"),
    [
        ([1.0, 1.0, 1.0, 1.0], 4, 4),  # equal work: as many as asked
        ([1.0, 1.0, 1.0, 1.0], 2, 2),
        ([1.0] * 4, 9, 4),  # never more than samples with work
        ([0.7] * 3, 8, 3),  # 0.7 + 0.7 + 0.7 falls short of 3 x 0.7 in floating point
        ([0.3] * 10, 10, 10),
        ([5.0, 1.0, 1.0, 1.0], 4, 1),  # 8 / 5: one sample dominates
        ([4.0, 3.0, 3.0, 2.0], 4, 3),
        ([3.0], 8, 1),
        ([3.0, 0.0, 0.0], 8, 1),  # text-only samples bring no encoder work
        ([0.0, 0.0, 0.0], 2, 2),  # only text
        ([0.0, 0.0, 0.0], 8, 3),
    ],
)
def test_effective_microbatches(encoder: list[float], limit: int, expected: int) -> None:
    assert effective_microbatches(np.array([encoder]), limit).tolist() == [expected]


# c. Microbatches


def order_of(encoder: FloatArray, llm: FloatArray) -> IntArray:
    """The order of the samples of one replica."""
    (order,) = stratified_order(encoder[None], llm[None])
    return order


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(work, positive_work), min_size=1, max_size=20))
def test_coarse_samples_come_first_each_stratum_by_falling_encoder_work(rows: list[tuple[float, float]]) -> None:
    encoder, llm = (np.array(column) for column in zip(*rows, strict=True))
    order = order_of(encoder, llm)
    assert sorted(order.tolist()) == list(range(len(rows)))
    coarse = llm[order] > np.median(llm)
    assert np.all(coarse[:-1] >= coarse[1:]), "coarse, then fine"
    for stratum in (order[coarse], order[~coarse]):
        assert np.all(np.diff(encoder[stratum]) <= 0)
        equal = np.diff(encoder[stratum]) == 0
        assert np.all(np.diff(stratum)[equal] > 0), "of equal work in order of arrival"


@pytest.mark.wide
@settings(max_examples=150, deadline=None)
@given(st.lists(positive_work, min_size=1, max_size=25), st.integers(1, 8))
def test_encoder_loads_stay_within_grahams_bound(encoder: list[float], count: int) -> None:
    work_s = np.array(encoder)
    order = order_of(work_s, work_s[::-1].copy())
    microbatch = assign_microbatches(order, work_s, work_s[::-1].copy(), count)
    load = np.bincount(microbatch, weights=work_s, minlength=count)
    at_least = max(work_s.sum() / count, work_s.max())
    assert load.max() <= (2 - 1 / count) * at_least * (1 + 1e-9)
    assert load.sum() == pytest.approx(work_s.sum())


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(work, positive_work), min_size=1, max_size=20), st.integers(1, 6))
def test_each_sample_goes_to_the_least_encoder_work_then_the_least_llm_work(
    rows: list[tuple[float, float]], count: int
) -> None:
    encoder, llm = (np.array(column) for column in zip(*rows, strict=True))
    order = order_of(encoder, llm)
    microbatch = assign_microbatches(order, encoder, llm, count)
    loads = [(0.0, 0.0)] * count
    for sample in order.tolist():
        chosen = int(microbatch[sample])
        if encoder[sample] > 0:
            assert loads[chosen] == min(loads)
        else:
            assert loads[chosen][1] == min(load for _, load in loads)
        loads[chosen] = (loads[chosen][0] + float(encoder[sample]), loads[chosen][1] + float(llm[sample]))


# The whole assigner


MODEL = tiny_model(encoder=4, llm=4)


def assigned(
    shapes: SampleShapes, dp: int, count: int, defer: bool = True
) -> tuple[IntArray, IntArray, IntArray, Profile]:
    """Replica, encoder microbatch (-1 without items) and LLM microbatch of every sample, and the profile used."""
    profile = profile_of(tiny_job(MODEL, global_batch=len(shapes), microbatch_size=1), shapes)
    assignment = EntrainAssigner(defer=defer).assign(shapes, chain_layout(MODEL, 1, 1, count, dp), profile)
    vision, llm = assignment.modules
    encoder = np.full(len(shapes), -1)
    encoder[shapes.item_sample] = vision.microbatch
    assert np.array_equal(vision.replica, llm.replica[shapes.item_sample])
    return llm.replica, encoder, llm.microbatch, profile


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 8), st.integers(1, 6))
def test_assignments_are_balanced_over_replicas_and_defer_by_one_at_most(
    seed: int, dp: int, each: int, count: int
) -> None:
    shapes = random_samples(np.random.default_rng(seed), dp * each, longest=4000)
    replica, encoder, llm, _ = assigned(shapes, dp, count)
    assert np.bincount(replica, minlength=dp).tolist() == [each] * dp
    assert np.all(llm < count)
    has_items = encoder >= 0
    assert np.all((llm - encoder)[has_items] <= 1)
    assert np.all(llm[has_items] >= encoder[has_items])


def test_deferral_evens_out_llm_work_of_a_skewed_batch() -> None:
    rng = np.random.default_rng(5)
    rows = [(int(rng.lognormal(6, 1)) + 1, [int(rng.integers(1000, 3000))]) for _ in range(64)]
    shapes = samples(*rows)
    spread_of = {}
    for defer in (False, True):
        _, _, llm, profile = assigned(shapes, 1, 16, defer)
        _, llm_s = profile.estimates.samples(shapes, 1, 1)
        spread_of[defer] = np.bincount(llm, weights=llm_s)
    assert spread_of[True].max() < spread_of[False].max()
    assert spread_of[True].std() < spread_of[False].std()
