"""Intervals, the best and rankings against scipy and values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from entrain_bench.answers.statistics import (
    Best,
    Interval,
    kendall_tau,
    mean_interval,
    not_worse,
    ratio_chance,
    ratio_interval,
    t_quantile,
)

NUMBERS = st.lists(st.floats(0.1, 1e3), min_size=2, max_size=12)
RANKS = st.lists(st.integers(0, 4), min_size=2, max_size=8)


def test_an_interval_by_hand() -> None:
    # Mean 3, standard deviation 1, standard error 1/sqrt(4); 3.182 for three degrees of freedom.
    found = mean_interval([2.0, 3.0, 4.0, 3.0, 2.0, 4.0, 3.0, 3.0])
    error = math.sqrt(4 / 7 / 8)
    assert (found.mean, found.num_values) == (3.0, 8)
    assert found.high - 3 == pytest.approx(2.364624 * error, rel=1e-6)
    assert found.margin == pytest.approx(found.high - 3)


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
@given(st.lists(st.floats(-0.5, 0.5), min_size=2, max_size=8), st.integers(0, 9))
def test_chances_of_ratios_are_scipys(values: list[float], seed: int) -> None:
    others = np.random.default_rng(seed).uniform(1.0, 2.0, len(values))
    assume(np.std(values) > 1e-3)
    ratios = np.exp(values) * others
    expected = stats.ttest_1samp(values, 0.0).pvalue
    assert ratio_chance(ratios.tolist(), others.tolist()) == pytest.approx(expected, abs=1e-6)


def test_who_is_not_worse_than_the_best() -> None:
    noise = [0.0, 0.1, -0.1, 0.05, -0.05, 0.2, -0.2, 0.0]
    times = {
        "best": [10.0 + 5 * e for e in noise],
        # The same seeds are slow for it: a little worse, and every time.
        "worse": [10.1 + 5 * e for e in noise],
        # Better at times.
        "close": [10.1 - 5 * e for e in noise],
        "twice": [20.0 + e for e in noise],
    }
    assert not_worse(times) == Best(frozenset({"best"}), frozenset({"best", "close"}), known=True)
    found = not_worse({"one": [3.0, 4.0], "same": [3.0, 4.0 * (1 + 1e-12)], "other": [3.1, 5.0]})
    assert found == Best(frozenset({"one", "same"}), frozenset({"one", "same", "other"}), known=True)


def test_one_seed_excludes_nothing() -> None:
    found = not_worse({"one": [3.0], "other": [3.1], "same": [3.0]})
    assert found == Best(frozenset({"one", "same"}), frozenset({"one", "other", "same"}), known=False)
    assert not_worse({"alone": [3.0, 4.0]}) == Best(frozenset({"alone"}), frozenset({"alone"}), known=True)


def test_more_strategies_in_a_row_ask_for_stronger_evidence() -> None:
    base = np.ones(8)
    slower = np.exp(0.1 * np.array([1.0, -0.1, 1.0, 0.5, 1.0, -0.1, 1.0, 0.5]))
    chance = stats.ttest_1samp(np.log(slower), 0, alternative="greater").pvalue
    # Two strategies make two ordered pairs, five make twenty.
    assert 0.05 / 20 < chance < 0.05 / 2
    assert not_worse({"best": base, "slower": slower}).best == {"best"}
    four = {f"slower {i}": slower for i in range(4)}
    assert not_worse({"best": base} | four).best == {"best", *four}


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
