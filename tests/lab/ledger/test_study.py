"""The fit of a ledger by source: constants that made the data, sources left out, ranges, and what stays open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

import numpy as np
import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import Composer
from entrain_bench.lab.ledger import study as studies
from entrain_bench.lab.ledger.constants import with_names
from entrain_bench.lab.ledger.forwards import ForwardCase, read_forwards
from entrain_bench.lab.ledger.page import model_error
from entrain_bench.lab.ledger.study import LIMITED, Ledger, Study, constants_table, posterior, study_of
from entrain_bench.specs.cluster import Speed
from support.ledger import CONSTANTS, DEVICE, made_up_ledger


@pytest.fixture(scope="module")
def exact() -> Ledger:
    return made_up_ledger(1.0, 1.0)


def test_the_constant_that_made_the_times_is_found_and_printed(exact: Ledger) -> None:
    study = study_of(exact, CONSTANTS)
    assert study.values(DEVICE) == {LIMITED: pytest.approx(0.6, rel=0.03)}
    title, heading, rows = constants_table(study)
    assert "error of a source left out: 2.0%" in title
    assert heading == ["constant", DEVICE]
    assert rows[0][0] == LIMITED
    assert rows[0][1].startswith(f"{study.values(DEVICE)[LIMITED]:.2g} (")


def test_a_source_is_predicted_without_itself() -> None:
    """The odd source pulls the whole fit towards itself, and is predicted by the constants of the others."""
    odd = made_up_ledger(1.0, 1.0, 2.0)
    study = study_of(odd, CONSTANTS)
    ratios = [outcome.ratio for outcome in study.left_out(odd)]
    # Half, and a little less: two sources do not outweigh what is expected beforehand.
    assert ratios[-2:] == pytest.approx([0.47, 0.47], rel=0.08)
    assert study.fit.factors(DEVICE)[0] < study.without["lab2"].factors(DEVICE)[0]


def test_ranges_of_forwards_limit_the_fitted_value(exact: Ledger) -> None:
    composer = Composer()
    cases = [ForwardCase.of(row, composer) for row in read_forwards()[:2]]
    device = cases[0].truth.cluster.device.name

    def holds(value: float) -> bool:
        change = with_names({LIMITED: value})
        return all(case.row.least_ms <= case.predicted_ms(change) <= case.row.most_ms for case in cases)

    fitted = study_of(exact, CONSTANTS).fit
    known = replace(fitted, problem=replace(fitted.problem, devices=(device,)), at=np.array([[0.2]]))
    limit = studies._limit(CONSTANTS, known, device, cases)
    assert limit < 0.97
    assert holds(limit)
    assert not holds(limit + 0.01)
    slow = replace(known, at=np.array([[-4.0]]))
    with pytest.raises(UserError, match=f"{device}: no value of {LIMITED} keeps"):
        studies._limit(CONSTANTS, slow, device, cases)


def spread_of(draws: Mapping[int, Speed], name: str) -> float:
    return float(np.std([np.log(getattr(speed, name)) for speed in draws.values()]))


def test_draws_are_sets_of_factors_for_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies, "CARRIED", {"other": DEVICE})
    found = posterior(made_up_ledger(1.0, 1.0, change=None), 0.05)
    assert set(found) == {DEVICE, "other"}
    assert found["other"] == found[DEVICE]
    assert [*found[DEVICE]] == [*range(1, 51)]
    assert min(spread_of(found[DEVICE], field.name) for field in fields(Speed)) > 0
    # Runs bound by products tell the rate of products; nothing in one node's run tells the network's.
    assert spread_of(found[DEVICE], "gemm") < 0.135
    assert spread_of(found[DEVICE], "launch") > 0.3


def test_a_source_that_contradicts_the_constants_does_not_narrow_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies, "CARRIED", {})
    found = posterior(made_up_ledger(2.0, 2.0, change=None), 0.05)
    assert spread_of(found[DEVICE], "gemm") > 0.138


def test_what_figures_say(exact: Ledger) -> None:
    study = study_of(exact, CONSTANTS)
    said = model_error(study.left_out(exact))
    assert said.endswith("100% within 10%, over 4 published iteration times, each source left out of the fit")
    assert model_error([]) == "model error: not measured"
    assert isinstance(study, Study)
