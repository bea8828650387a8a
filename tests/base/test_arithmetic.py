"""Arithmetic with the same bits everywhere, against NumPy, the decimal module and hand-worked values."""

from __future__ import annotations

import math
from decimal import Decimal, getcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrain_bench.base.arithmetic import decisive, exp, fit_polynomial, log, log2, matmul, sine_of_turns, solve

SEEDS = st.integers(0, 2**32 - 1)


@given(SEEDS, st.integers(1, 7), st.integers(1, 5))
def test_products_are_numpys_but_for_the_last_digits(seed: int, inner: int, columns: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(4, inner)), rng.normal(size=(inner, columns))
    for right in (b, b[:, 0]):
        np.testing.assert_allclose(matmul(a, right), a @ right, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(matmul(a[0], right), a[0] @ right, rtol=1e-12, atol=1e-13)


def test_products_add_in_the_order_of_the_inner_dimension() -> None:
    # From left to right the small numbers are lost; from right to left they are not.
    assert matmul([1e16, 1.0, 1.0], [1.0, 1.0, 1.0]) == 1e16
    assert matmul([1.0, 1.0, 1e16], [1.0, 1.0, 1.0]) == 1e16 + 2


@given(SEEDS, st.integers(1, 12))
def test_positive_definite_systems(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    factor = rng.normal(size=(size + 3, size))
    matrix, right = factor.T @ factor + 0.01 * np.eye(size), rng.normal(size=size)
    np.testing.assert_allclose(solve(matrix, right), np.linalg.solve(matrix, right), rtol=1e-6, atol=1e-9)


def test_a_polynomial_that_fits_is_found_exactly() -> None:
    points = np.array([0, 64, 256, 1024, 4096, 16384])
    values = 3.0 * points**2 - 5.0 * points + 7.0
    assert fit_polynomial(points, values, 2).tolist() == [3.0, -5.0, 7.0]


@given(SEEDS)
def test_least_squares_are_numpys_but_for_the_last_digits(seed: int) -> None:
    points, values = np.array([1, 2, 4, 7, 9]), np.random.default_rng(seed).normal(size=5)
    wanted = np.linalg.lstsq(np.vander(points.astype(float), 3), values, rcond=None)[0]
    np.testing.assert_allclose(fit_polynomial(points, values, 2), wanted, rtol=1e-9, atol=1e-11)


@given(st.floats(1e-300, 1e300))
def test_logarithms_to_an_ulp_or_two(value: float) -> None:
    getcontext().prec = 40
    exact = Decimal(value).ln() / Decimal(2).ln()
    assert abs(Decimal(float(log2(value))) - exact) <= Decimal("4e-16") * max(1, abs(exact))
    assert log(value) == pytest.approx(math.log(value), rel=1e-14, abs=1e-15)


def test_logarithms_of_powers_of_two_are_exact() -> None:
    powers = np.arange(-40.0, 60.0)
    np.testing.assert_array_equal(log2(2.0**powers), powers)


@given(st.floats(-700, 700))
def test_exponentials(value: float) -> None:
    assert exp(value) == pytest.approx(math.exp(value), rel=4e-16 * max(1.0, abs(value)))
    assert exp(log(math.exp(value))) == pytest.approx(math.exp(value), rel=1e-12)
    assert exp(0.0) == 1.0


@given(st.floats(-50, 50))
def test_sines(turns: float) -> None:
    # Whole turns are taken off first, which is exact.
    assert float(sine_of_turns(turns)) == pytest.approx(math.sin(2 * math.pi * math.fmod(turns, 1.0)), abs=2e-15)


def test_sines_of_quarter_turns_are_exact() -> None:
    np.testing.assert_array_equal(sine_of_turns([0.0, 0.5, 1.0, -0.5, 7.0]), np.zeros(5))
    np.testing.assert_allclose(sine_of_turns([0.25, 0.75, -0.25, 0.125]), [1, -1, -1, math.sqrt(0.5)], rtol=1e-15)


@given(st.floats(1e-200, 1e200), st.integers(-8, 8))
def test_what_differs_in_the_last_digits_only_is_decided_alike(value: float, ulps: int) -> None:
    coarse = decisive(value)
    assert coarse == pytest.approx(value, rel=1e-9)
    assert decisive(coarse) == coarse
    # From the middle of what rounds to the same number, some digits do not matter.
    assert decisive(coarse * (1 + ulps * 2.0**-52)) == coarse
    assert decisive(np.array([coarse, -coarse]) * (1 + ulps * 2.0**-52)).tolist() == [coarse, -coarse]


def test_nothing_and_the_infinite_stay_what_they_are() -> None:
    assert decisive(np.array([0.0, np.inf, -np.inf])).tolist() == [0.0, np.inf, -np.inf]
