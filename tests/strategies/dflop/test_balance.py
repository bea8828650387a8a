"""DFLOP's buckets: LPT, exchange and CP-SAT, against brute force, and their limits."""

import signal
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.lpt import longest_first, lpt_with_exchange, trivial_bound
from entrain_bench.base.arrays import FloatArray
from entrain_bench_strategies.dflop.assigner import balance, improve, makespan, solve


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 3))
def test_the_solver_finds_the_optimum_of_small_cases(seed: int, items: int, buckets: int) -> None:
    cost = np.random.default_rng(seed).integers(0, 20, (items, 2)).astype(np.float64)
    best = min(makespan(cost, np.array(choice), buckets) for choice in product(range(buckets), repeat=items))
    assert makespan(cost, balance(cost, buckets, 0.05), buckets) == pytest.approx(best)
    assert trivial_bound(cost, buckets) <= best


def plain_lpt(cost: FloatArray, num_buckets: int) -> list[int]:
    """The definition, every bucket looked at for every item."""
    load, bucket = np.zeros((num_buckets, 2)), [0] * len(cost)
    for item in np.argsort(-cost.max(axis=1), kind="stable").tolist():
        higher, sums = (load + cost[item]).max(axis=1), load.sum(axis=1)
        bucket[item] = min(range(num_buckets), key=lambda b: (higher[b], sums[b], b))
        load[bucket[item]] += cost[item]
    return bucket


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 200), st.integers(1, 70), st.sampled_from(["many", "few", "none"]))
def test_lpt_is_that_of_the_definition_ties_included(seed: int, items: int, buckets: int, ties: str) -> None:
    rng = np.random.default_rng(seed)
    cost = rng.integers(0, {"many": 3, "few": 50, "none": 2**40}[ties], (items, 2)).astype(np.float64)
    assert longest_first(cost, buckets).tolist() == plain_lpt(cost, buckets)


def test_exchange_beats_lpt_and_the_solver_beats_exchange() -> None:
    cost = np.array([[0.0, v] for v in (7, 7, 6, 6, 5, 5, 4, 4, 4)])
    assert makespan(cost, longest_first(cost, 4), 4) == 15
    assert makespan(cost, balance(cost, 4, 0.0), 4) == 12
    # LPT leaves {11, 4, 4}, {9, 8, 4}; the best is {11, 9}, {8, 4, 4, 4}, a swap of two items for one.
    cost = np.array([[0.0, v] for v in (11, 9, 8, 4, 4, 4)])
    assert makespan(cost, balance(cost, 2, 0.0), 2) == 21
    assert makespan(cost, balance(cost, 2, 0.05), 2) == 20


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 30), st.integers(1, 6))
def test_exchange_ends_where_none_helps_the_fullest_bucket(seed: int, items: int, buckets: int) -> None:
    cost = np.random.default_rng(seed).pareto(1.5, (items, 2))
    start, found = longest_first(cost, buckets), lpt_with_exchange(cost, buckets)
    high = makespan(cost, found, buckets)
    assert high <= makespan(cost, start, buckets)
    assert len(np.unique(found)) == len(np.unique(start))
    if high <= trivial_bound(cost, buckets) * (1 + 1e-6):
        return
    full = np.maximum(*(np.bincount(found, weights=column, minlength=buckets) for column in cost.T)).argmax()
    for one, other in product(np.flatnonzero(found == full), range(buckets)):
        for two in (None, *np.flatnonzero(found == other)):
            changed = found.copy()
            changed[one] = other
            if two is not None:
                changed[two] = full
            both = np.isin(changed, [full, other])
            assert makespan(cost[both], changed[both], buckets) >= high * (1 - 2e-6)


@pytest.mark.wide
def test_the_solver_closes_most_of_lpts_gap_on_a_batch() -> None:
    cost = np.random.default_rng(0).lognormal(0, 1.0, (256, 2))
    bound, start = trivial_bound(cost, 16), longest_first(cost, 16)
    left = makespan(cost, improve(cost, 16, start, 0.1), 16) - bound
    assert left < 0.5 * (makespan(cost, start, 16) - bound)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-4, 0.01]))
def test_the_solver_never_hurts_and_repeats_itself(seed: int, work: float) -> None:
    cost = np.random.default_rng(seed).pareto(1.5, (40, 2))
    start = longest_first(cost, 6)
    found = improve(cost, 6, start, work)
    assert makespan(cost, found, 6) <= makespan(cost, start, 6)
    np.testing.assert_array_equal(found, improve(cost, 6, start, work))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the signals a process catches are read from /proc")
def test_ctrl_c_reaches_python_after_the_solver() -> None:
    def caught() -> bool:
        lines = Path("/proc/self/status").read_text().splitlines()
        (mask,) = (int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))
        return bool(mask >> (signal.SIGINT - 1) & 1)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert caught()
        solve(
            np.array([[5.0, 1.0], [4.0, 2.0], [3.0, 3.0], [3.0, 1.0]]),
            2,
            np.array([0, 0, 1, 1]),
            1.0,
        )
        assert caught()
    finally:
        signal.signal(signal.SIGINT, before)
