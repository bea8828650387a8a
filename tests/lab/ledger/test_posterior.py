"""Draws have the fit's covariance, hold what must hold, and are the same every time."""

from __future__ import annotations

import numpy as np
import pytest

from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import UserError
from entrain_bench.lab.ledger.fit import Fit, Interval, Knob, Point, fit_points
from entrain_bench.lab.ledger.posterior import draw


def both(factors: FloatArray) -> Interval:
    """Only the product of the two factors is measured."""
    return (1.0 / (factors[0] * factors[1]),) * 2


@pytest.fixture(scope="module")
def fit() -> Fit:
    points = [Point(f"s{n}", "a", (1.0, 1.0), both) for n in range(30)]
    return fit_points(points, (Knob("gemm", 0.2), Knob("memory", 0.2)))


def always(_: FloatArray) -> bool:
    return True


def test_draws_are_correlated_as_the_fit_is(fit: Fit) -> None:
    logs = np.log(draw(fit, "a", always, 2000))
    # Each alone is known no better than 0.2 / sqrt(2), their product well.
    assert np.std(logs, axis=0) == pytest.approx([0.2 / np.sqrt(2)] * 2, rel=0.1)
    assert np.corrcoef(logs.T)[0, 1] < -0.95
    assert np.std(logs.sum(axis=1)) < 0.02


def test_draws_are_the_same_every_time_and_rounded(fit: Fit) -> None:
    first = draw(fit, "a", always)
    assert first.shape == (50, 2)
    assert np.array_equal(first, draw(fit, "a", always))
    assert all(float(f"{factor:.4g}") == factor for factor in first.ravel().tolist())
    assert not np.array_equal(first, draw(fit, "a", always, seed=1))


def test_only_accepted_draws_are_given(fit: Fit) -> None:
    assert draw(fit, "a", lambda factors: bool(factors[0] > 1.1))[:, 0].min() > 1.1
    with pytest.raises(UserError, match="a: fewer than 1 in"):
        draw(fit, "a", lambda _: False, 1)


def test_a_source_stays_within_the_error_of_predictions() -> None:
    # One source says nearly nothing of a wide prior, but what it says must hold.
    wide = fit_points([Point("s", "a", (1.0, 1.0), both)], (Knob("gemm", 0.3), Knob("memory", 0.001)))
    loose = Fit(wide.problem, wide.at, wide.covariance + np.diag([0.09, 0.0]), 0.05)
    logs = np.log(draw(loose, "a", always)[:, 0])
    assert 0.05 < np.abs(logs).max() < 0.101
