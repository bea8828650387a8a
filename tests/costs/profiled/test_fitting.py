"""Least squares without negative factors: by hand, and against every set of factors that may be 0."""

from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.costs.profiled.fitting import fit_factors


def test_parts_that_add_up_to_the_seconds_are_found() -> None:
    parts = np.array([[1.0, 10.0], [1.0, 1000.0], [1.0, 50.0]])
    assert fit_factors(parts, [2.0 + 0.5 * x for x in parts[:, 1]]) == pytest.approx([2.0, 0.5], rel=1e-6)


def test_a_part_that_would_be_negative_is_left_out() -> None:
    # Falling seconds: nothing rises with the second part, so the constant alone, least in relative squares.
    parts = np.array([[1.0, 1.0], [1.0, 2.0]])
    a = (1 / 3 + 1 / 2) / (1 / 9 + 1 / 4)
    assert fit_factors(parts, [3.0, 2.0]) == pytest.approx([a, 0.0], rel=1e-6)


def residual(parts: np.ndarray, seconds: np.ndarray, factors: np.ndarray) -> float:
    return float(((parts @ factors / seconds - 1) ** 2).sum())


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**31), count=st.integers(1, 5))
def test_no_set_of_factors_above_zero_is_better(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    parts, seconds = rng.random((count + 3, count)), 0.1 + rng.random(count + 3)
    found = fit_factors(parts, [*seconds])
    best = np.inf
    for used in chain.from_iterable(combinations(range(count), size) for size in range(count + 1)):
        factors = np.zeros(count)
        if used:
            columns = parts[:, used] / seconds[:, None]
            factors[list(used)] = np.linalg.lstsq(columns, np.ones(len(seconds)), rcond=None)[0]
        if (factors >= 0).all():
            best = min(best, residual(parts, seconds, factors))
    assert (found >= 0).all()
    assert residual(parts, seconds, found) <= best + 1e-6
