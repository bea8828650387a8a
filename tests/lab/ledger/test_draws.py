"""Draws of hardware constants: they are as wide and correlated as the fit, and keep what was published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

import numpy as np
import pytest

from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import UserError
from entrain_bench.lab.ledger import draws as drawing
from entrain_bench.lab.ledger.draws import draw, draw_constants, pulled
from entrain_bench.lab.ledger.fit import Constant, Fit, Point, fit_points
from entrain_bench.lab.ledger.predict import Interval
from entrain_bench.specs.cluster import Speed
from support.ledger import DEVICE, made_up_ledger


def spread(draws: Mapping[int, Speed], name: str) -> float:
    return float(np.std([np.log(getattr(speed, name)) for speed in draws.values()]))


@pytest.mark.wide
def test_draws_are_sets_of_factors_for_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "CARRIED", {"other": DEVICE})
    monkeypatch.setattr(drawing, "WIDER", {"newer": DEVICE})
    draws = draw_constants(made_up_ledger(1.0, 1.0, change=None), 0.05)
    assert set(draws) == {DEVICE, "newer", "other"}
    assert draws["other"] == draws[DEVICE]
    assert spread(draws["newer"], "gemm") == pytest.approx(2 * spread(draws[DEVICE], "gemm"))
    assert [*draws[DEVICE]] == [*range(1, 51)]
    assert min(spread(draws[DEVICE], field.name) for field in fields(Speed)) > 0
    # Runs bound by products tell the rate of products; nothing in one node's run tells the network's.
    assert spread(draws[DEVICE], "gemm") < 0.135
    assert spread(draws[DEVICE], "launch") > 0.3


def test_a_source_that_contradicts_the_constants_does_not_narrow_them() -> None:
    draws = draw_constants(made_up_ledger(2.0, 2.0, change=None), 0.05)
    assert spread(draws[DEVICE], "gemm") > 0.138


def both(factors: FloatArray) -> Interval:
    """Only the product of the two factors is measured."""
    return (1.0 / (factors[0] * factors[1]),) * 2


def knobs(gemm: float, memory: float) -> tuple[Constant, Constant]:
    return Constant("speed", "gemm", 1.0, gemm, 0.0, ""), Constant("speed", "memory", 1.0, memory, 0.0, "")


@pytest.fixture(scope="module")
def fit() -> Fit:
    return fit_points([Point(f"s{n}", "a", 1.0, both) for n in range(30)], knobs(0.2, 0.2))


@pytest.mark.wide
def test_draws_are_correlated_as_the_fit_is(fit: Fit) -> None:
    logs = np.log(draw(fit, "a", count=2000))
    # Each alone is known no better than 0.2 / sqrt(2), their product well.
    assert np.std(logs, axis=0) == pytest.approx([0.2 / np.sqrt(2)] * 2, rel=0.1)
    assert np.corrcoef(logs.T)[0, 1] < -0.95
    assert np.std(logs.sum(axis=1)) < 0.02
    # They are the same every time, and rounded.
    first = draw(fit, "a")
    assert np.array_equal(first, draw(fit, "a"))
    assert all(float(f"{factor:.4g}") == factor for factor in first.ravel().tolist())


@pytest.mark.wide
def test_only_draws_that_keep_published_ranges_are_given(fit: Fit) -> None:
    kept = Point("range", "a", 1.0, lambda factors: (1.1 / factors[0], 9.0))
    assert draw(fit, "a", [kept])[:, 0].min() >= 1.1
    with pytest.raises(UserError, match="a: fewer than 1 in"):
        draw(fit, "a", [Point("range", "a", 1.0, lambda _: (2.0, 3.0))], 1)


def test_a_source_stays_within_the_error_of_predictions() -> None:
    # One source says nearly nothing of a wide prior, but what it says must hold.
    wide = fit_points([Point("s", "a", 1.0, both)], knobs(0.3, 0.001))
    loose = Fit(wide.problem, wide.at, wide.covariance + np.diag([0.09, 0.0]), 0.05)
    logs = np.log(draw(loose, "a")[:, 0])
    assert 0.05 < np.abs(logs).max() < 0.101


def test_pulled_draws_cover_both_readings() -> None:
    drawn = {number: Speed(gemm=0.9, attention=1.0, memory=0.8) for number in range(1, 51)}
    moved = pulled(drawn, Speed(gemm=2.0, attention=2.0))
    gemm = np.array([speed.gemm for speed in moved.values()])
    assert (gemm.min(), gemm.max()) == pytest.approx((0.9, 2.0), rel=0.01)
    # Even on the logs, and one share a draw: attention lies where products do.
    assert np.log(gemm).mean() == pytest.approx(np.log([0.9, 2.0]).mean(), abs=0.001)
    attention = np.array([speed.attention for speed in moved.values()])
    np.testing.assert_allclose(np.log(attention) / np.log(2), np.log(gemm / 0.9) / np.log(2 / 0.9), atol=0.001)
    assert {speed.memory for speed in moved.values()} == {0.8}
