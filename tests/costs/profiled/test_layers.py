"""Curves of a profile: lines, knots, and factors fitted to them."""

from itertools import chain, combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.costs.profiled.layers import Curve, PiecewiseLine, fit_factors, knots_of_scores, rises

LINE = PiecewiseLine(np.array([10.0, 20.0, 40.0]), np.array([5.0, 6.0, 12.0]))


def test_a_line_is_constant_below_its_first_knot_and_goes_on_beyond_the_last() -> None:
    assert LINE.at(np.array([1, 10, 15, 20, 30, 40, 50])).tolist() == [5.0, 5.0, 5.5, 6.0, 9.0, 12.0, 15.0]
    assert PiecewiseLine(np.array([10.0]), np.array([3.0])).at(np.array([5, 10, 20])).tolist() == [3.0, 3.0, 6.0]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_no_place_has_a_lower_rate(seed: int) -> None:
    rng = np.random.default_rng(seed)
    line = PiecewiseLine(np.cumsum(1 + rng.integers(0, 9, 5)).astype(float), np.cumsum(rng.random(5)))
    inside = np.linspace(line.knots[0], line.knots[-1], 101)
    assert (line.at(inside) / inside >= line.least_rate(beyond=False) - 1e-12).all()
    outside = inside * 3
    assert (line.at(outside) / outside >= line.least_rate(beyond=True) - 1e-12).all()
    assert (np.diff(line.at(np.arange(100.0))) >= 0).all()


def test_rises_add_up_to_the_lines_through_their_knots() -> None:
    knots, places = np.array([1.0, 3.0, 7.0]), np.array([1.0, 2.0, 3.0, 5.0, 7.0])
    assert (rises(knots, places) @ [4.0, 8.0]).tolist() == [0.0, 2.0, 4.0, 8.0, 12.0]
    assert rises(knots, np.array([11.0])).tolist() == [[1.0, 2.0]]
    assert rises(knots[:1], places).shape == (5, 0)


def test_the_terms_add_up_and_no_tokens_take_no_time() -> None:
    curve = Curve(LINE, PiecewiseLine(np.array([0.0, 100.0]), np.array([0.0, 2.0])), 0.25)
    seconds = curve.at(np.array([15.0, 0.0]), np.array([50.0, 0.0]), np.array([4.0, 0.0]))
    assert seconds.tolist() == [5.5 + 1.0 + 1.0, 0.0]


def test_knots_of_scores_are_the_most_of_each_number_of_tokens_that_count() -> None:
    tokens, scores = np.array([4.0, 64.0, 64.0, 512.0, 512.0, 900.0]), np.array([8.0, 30.0, 4096.0, 900.0, 9000.0, 1e6])
    assert knots_of_scores(tokens, scores).tolist() == [0.0, 4096.0, 9000.0]
    # Where none count, the most.
    assert knots_of_scores(tokens[1:3], np.array([10.0, 300.0])).tolist() == [0.0, 300.0]
    assert knots_of_scores(tokens, np.zeros(6)).tolist() == [0.0]


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
