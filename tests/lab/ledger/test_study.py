"""The fit of a ledger by source: constants that made the data, sources left out, ranges, and what stays open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

import numpy as np
import pytest

from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import Composer
from entrain_bench.lab.ledger import study as studies
from entrain_bench.lab.ledger.fit import Fit, Interval, Knob, Point, fit_points
from entrain_bench.lab.ledger.study import (
    SPEED,
    Constant,
    Ledger,
    at_speed,
    constants_table,
    draw,
    fit_ledger,
    make_speed,
    posterior,
    with_constants,
)
from entrain_bench.lab.ledger.tables import make_frame, model_error
from entrain_bench.specs.cluster import ClusterSpec, Speed
from support.ledger import CONSTANTS, DEVICE, made_up_ledger

CLUSTER = ClusterSpec.from_config(Composer().run(("cluster=a40x64",)).cluster)
NAME = "device.sustained_fraction"


def test_a_constant_reaches_the_tiers_of_its_place() -> None:
    constants = (
        Constant("device", "sustained_fraction", 0.5, 1.0, 0.0, ""),
        Constant("node", "latency_s", 1e-6, 1.0, 0.0, ""),
        Constant("network", "latency_s", 3e-6, 1.0, 0.0, ""),
    )
    changed = with_constants(constants, np.array([0.5, 2.0, 1.0]))(CLUSTER)
    assert changed.device.sustained_fraction == 0.25
    assert [tier.latency_s for tier in changed.tiers] == [2e-6, 2e-6, 3e-6]


def test_a_share_is_at_most_one() -> None:
    assert Constant("device", "sustained_fraction", 0.75, 1.0, 0.0, "").value(2.0) == 1.0
    assert Constant("node", "latency_s", 1e-6, 1.0, 0.0, "").value(2e6) == 2.0


def test_factors_of_speed_are_all_fitted_and_in_their_places() -> None:
    factors = np.arange(1, len(SPEED) + 1, dtype=float)
    speed = make_speed(factors, 9.0)
    expected = {knob.name: factor for knob, factor in zip(SPEED, factors, strict=True)} | {"reserve": 9.0}
    assert {field.name: getattr(speed, field.name) for field in fields(Speed)} == expected
    assert at_speed(factors)(CLUSTER) == CLUSTER.at(make_speed(factors))


@pytest.fixture(scope="module")
def exact() -> Ledger:
    return made_up_ledger(1.0, 1.0)


def test_the_constant_that_made_the_times_is_found_and_printed(exact: Ledger) -> None:
    study = fit_ledger(exact, CONSTANTS)
    assert study.values(DEVICE) == {NAME: pytest.approx(0.6, rel=0.03)}
    title, heading, rows = constants_table(study)
    assert "error of a source left out: 2.0%" in title
    assert heading == ["constant", DEVICE]
    assert rows[0][0] == NAME
    assert rows[0][1].startswith(f"{study.values(DEVICE)[NAME]:.2g} (")
    said = model_error(make_frame(study.left_out(exact)))
    assert said.endswith("100% within 10%, over 4 published iteration times, each source left out of the fit")


def test_a_source_is_predicted_without_itself() -> None:
    """The odd source pulls the whole fit towards itself, and is predicted by the constants of the others."""
    odd = made_up_ledger(1.0, 1.0, 2.0)
    study = fit_ledger(odd, CONSTANTS)
    ratios = make_frame(study.left_out(odd))["ratio"].tolist()
    # Half, and a little less: two sources do not outweigh what is expected beforehand.
    assert ratios[-2:] == pytest.approx([0.47, 0.47], rel=0.08)
    assert study.fit.factors(DEVICE)[0] < study.without["lab2"].factors(DEVICE)[0]


def spread_of(draws: Mapping[int, Speed], name: str) -> float:
    return float(np.std([np.log(getattr(speed, name)) for speed in draws.values()]))


def test_draws_are_sets_of_factors_for_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies, "CARRIED", {"other": DEVICE})
    draws = posterior(made_up_ledger(1.0, 1.0, change=None), 0.05)
    assert set(draws) == {DEVICE, "other"}
    assert draws["other"] == draws[DEVICE]
    assert [*draws[DEVICE]] == [*range(1, 51)]
    assert min(spread_of(draws[DEVICE], field.name) for field in fields(Speed)) > 0
    # Runs bound by products tell the rate of products; nothing in one node's run tells the network's.
    assert spread_of(draws[DEVICE], "gemm") < 0.135
    assert spread_of(draws[DEVICE], "launch") > 0.3


def test_a_source_that_contradicts_the_constants_does_not_narrow_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies, "CARRIED", {})
    draws = posterior(made_up_ledger(2.0, 2.0, change=None), 0.05)
    assert spread_of(draws[DEVICE], "gemm") > 0.138


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
