"""The fit of a ledger by source: constants that made the data, and sources left out."""

from __future__ import annotations

import numpy as np
import pytest

from entrain_bench.config.compose import Composer
from entrain_bench.lab.ledger.fit import Constant
from entrain_bench.lab.ledger.page import make_frame, model_error
from entrain_bench.lab.ledger.study import Ledger, constants_table, fit_ledger, with_constants
from entrain_bench.specs.cluster import ClusterSpec
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
