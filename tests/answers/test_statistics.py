"""Intervals, the best and rankings against scipy and values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from entrain_bench.answers.statistics import (
    Interval,
    degrees_of_freedom,
    kendall_tau,
    mean_interval,
    not_worse,
    ratio_interval,
    t_quantile,
)

NUMBERS = st.lists(st.floats(0.1, 1e3), min_size=2, max_size=12)
RANKS = st.lists(st.integers(0, 4), min_size=2, max_size=8)


@pytest.mark.wide
@given(NUMBERS)
def test_intervals_are_scipys(values: list[float]) -> None:
    assume(np.std(values) > 1e-6)
    found = mean_interval(values)
    wanted = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), rel=1e-7, abs=1e-7)
    assert t_quantile(len(values) - 1) == pytest.approx(stats.t.ppf(0.975, len(values) - 1), rel=1e-8)


def test_a_single_value_has_no_interval() -> None:
    found = mean_interval([2.0])
    assert found == Interval(2.0, 2.0, 2.0, 1)
    assert math.isnan(found.margin)
    assert not found.excludes(5.0)
    assert Interval(2.0, 1.0, 3.0, 2).excludes(3.5)
    assert not Interval(2.0, 1.0, 3.0, 2).excludes(1.0)


def test_a_ratio_is_the_geometric_mean_of_the_pairs() -> None:
    # Half as fast once and twice as fast once is as fast.
    assert ratio_interval([1.0, 4.0], [2.0, 2.0]).mean == pytest.approx(1.0)
    # Seeds that differ a hundredfold do not widen the interval where all of them agree.
    same = ratio_interval([1.5, 150.0, 15.0], [1.0, 100.0, 10.0])
    assert (same.low, same.mean, same.high) == pytest.approx((1.5, 1.5, 1.5))
    with pytest.raises(ValueError, match="positive"):
        ratio_interval([1.0, 0.0], [1.0, 1.0])


@pytest.mark.wide
@given(NUMBERS, st.integers(0, 2**32 - 1))
def test_ratios_are_scipys_and_turned_round_alike(values: list[float], seed: int) -> None:
    others = np.random.default_rng(seed).uniform(0.5, 2.0, len(values)).tolist()
    found = ratio_interval(values, others)
    wanted = stats.ttest_rel(np.log(values), np.log(others)).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((math.exp(wanted.low), math.exp(wanted.high)), rel=1e-6)
    back = ratio_interval(others, values)
    assert (1 / back.high, 1 / back.mean, 1 / back.low) == pytest.approx((found.low, found.mean, found.high))


@pytest.mark.wide
@given(st.integers(2, 9), st.integers(2, 9), st.integers(0, 2**32 - 1), st.sampled_from([0.05, 0.025]))
def test_the_best_are_those_of_scipys_tests(names: int, seeds: int, seed: int, level: float) -> None:
    rng = np.random.default_rng(seed)
    logs = 0.03 * rng.standard_normal((names, seeds)) * rng.uniform(0.2, 3, (names, 1)) + rng.uniform(
        0, 0.2, (names, 1)
    )
    left = [*range(names)]
    least = int(np.exp(logs).sum(axis=1).argmin())
    while len(left) > 1:
        pairs = [(a, b) for a in left for b in left if a != b]
        spare = [np.var(logs[a] - logs[b], ddof=1) for a, b in pairs]
        parts = (1.0, 1.0) if len(left) == 2 else (0.8, 0.2)
        degrees = (degrees_of_freedom(len(left), seeds), seeds - 1)
        out = set()
        for (a, b), variance in zip(pairs, spare, strict=True):
            for part, freedom, used in zip(
                parts, degrees, (5 / 6 * variance + np.mean(spare) / 6, variance), strict=True
            ):
                t = (logs[a] - logs[b]).mean() / math.sqrt(used / seeds)
                if a != least and stats.t.sf(t, freedom) < part * level / len(pairs):
                    out.add(a)
        if not out:
            break
        left = [name for name in left if name not in out]
    times = np.exp(logs).tolist()
    assert not_worse(dict(enumerate(times)), level) == {*left}
    # Neither the order of names nor the unit of time decides.
    order = rng.permutation(names).tolist()
    assert not_worse({name: [1e3 * time for time in times[name]] for name in order}, level) == {*left}


def test_the_least_mean_is_never_excluded() -> None:
    # Slower by ratio at nearly all seeds, but by far faster at the one that takes long.
    logs = np.array([0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.07])
    long = [1.0] * 7 + [100.0]
    times = {"a": long, "b": [time * math.exp(log) for time, log in zip(long, logs, strict=True)]}
    assert not_worse(times) == frozenset("a")
    times["b"][-1] = 98.0
    assert not_worse(times, 0.2) == frozenset("ab")
    with pytest.raises(ValueError, match="positive"):
        not_worse({"a": [1.0, 0.0], "b": [1.0, 1.0]})


def test_one_seed_excludes_nothing() -> None:
    assert not_worse({"one": [3.0], "other": [3.1], "same": [3.0]}) == frozenset({"one", "other", "same"})
    assert not_worse({"alone": [3.0, 4.0]}) == frozenset({"alone"})


@pytest.mark.wide
@given(RANKS, st.integers(0, 2**32 - 1))
def test_rank_correlations_are_scipys(first: list[int], seed: int) -> None:
    second = np.random.default_rng(seed).integers(0, 4, len(first)).tolist()
    assume(len({*first}) > 1)
    assume(len({*second}) > 1)
    assert kendall_tau(first, second) == pytest.approx(stats.kendalltau(first, second).statistic)


def test_rankings_without_results_and_without_differences() -> None:
    # Of three pairs two agree; the third is tied on one side: 2 / sqrt(3 * 2).
    assert kendall_tau([1.0, 2.0, 3.0], [1.0, 3.0, 3.0]) == pytest.approx(2 / math.sqrt(6))
    assert kendall_tau([1.0, 2.0, math.inf], [1.0, 2.0, 3.0]) == 1.0
    assert kendall_tau([1.0, math.inf, math.inf], [math.inf, 1.0, 2.0]) == pytest.approx(-2 / math.sqrt(6))
    assert kendall_tau([1.0, 1.0], [2.0, 2.0]) == 1.0
    assert kendall_tau([1.0, 1.0], [2.0, 3.0]) == 0.0
    # The last digits rank nothing.
    assert kendall_tau([1.0, 1.0 + 1e-13, 2.0], [1.0, 1.0, 2.0]) == 1.0


def test_a_prediction_interval_contains_the_mean_of_further_values() -> None:
    # s = 1, t(2) = 4.302653: the mean of 3 and that of 6 further deviate by sqrt(1/3 + 1/6).
    found = mean_interval([1.0, 2.0, 3.0], further=6)
    assert (found.mean, found.num_values) == (2.0, 3)
    assert found.high - 2.0 == pytest.approx(4.302653 * math.sqrt(1 / 2), rel=1e-6)
    assert mean_interval([2.0], further=5) == mean_interval([2.0])
    rng = np.random.default_rng(3)
    rows = rng.lognormal(0.0, 0.2, (2000, 17))
    held = [not mean_interval(row[:12], further=5).excludes(math.fsum(row[12:]) / 5) for row in rows.tolist()]
    assert 0.94 <= np.mean(held) <= 0.96
