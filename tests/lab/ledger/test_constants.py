"""A constant has its place in a cluster, and a share never exceeds 1."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from entrain_bench.config.compose import Composer
from entrain_bench.lab.ledger.constants import FITTED, SPEED, Constant, at_speed, speed_of, with_constants
from entrain_bench.specs.cluster import ClusterSpec, Speed

CLUSTER = ClusterSpec.from_config(Composer().run(("cluster=a40x64",)).cluster)


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
    speed = speed_of(factors, 9.0)
    expected = {knob.name: factor for knob, factor in zip(SPEED, factors, strict=True)} | {"reserve": 9.0}
    assert {field.name: getattr(speed, field.name) for field in fields(Speed)} == expected
    assert at_speed(factors)(CLUSTER) == CLUSTER.at(speed_of(factors))


@pytest.mark.parametrize("constant", FITTED)
def test_fitted_constants_say_why_and_are_told_apart(constant: Constant) -> None:
    assert constant.why
    assert constant.usual > 0
    assert [other.knob.name for other in FITTED].count(constant.knob.name) == 1
