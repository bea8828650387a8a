"""Losses as the check judges them, by hand, and results that are read again."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

import pytest

from entrain_bench.lab.gpu_check.report import FAILED, PASSED, Finding, SectionResult, read_result
from entrain_bench.lab.gpu_check.sections import judge_losses
from entrain_bench.lab.measuring import write_json

REFERENCE = [7.0, 6.5, 6.0]


@pytest.mark.parametrize(
    ("losses", "verdict", "difference"),
    [
        ([7.0, 6.5, 6.0], PASSED, 0.0),
        ([7.0, 6.5, 6.0006], PASSED, 1e-4),
        # A planted error in one step.
        ([7.0, 6.5065, 6.0], FAILED, 1e-3),
        ([7.0, 6.5, math.nan], FAILED, math.nan),
        ([7.0, 6.5, math.inf], FAILED, math.nan),
        ([7.0, 6.5], FAILED, math.nan),
        ([], FAILED, math.nan),
    ],
)
def test_a_loss_that_differs_is_found(losses: list[float], verdict: str, difference: float) -> None:
    row = judge_losses("entrain", losses, REFERENCE, 2e-4)
    assert row["verdict"] == verdict
    assert row["largest_difference"] == pytest.approx(difference, rel=1e-6, abs=1e-12, nan_ok=True)


def test_nothing_equals_a_reference_that_is_not_there() -> None:
    assert judge_losses("entrain", [], [], 1.0)["verdict"] == FAILED
    assert judge_losses("entrain", [1.0], [math.nan], 1.0)["verdict"] == FAILED


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    finding = Finding(PASSED, "fine", {"Tests": [{"test": "a", "seconds": 0.5}]}, {"t": "x"})
    result = SectionResult("tests", "x", finding, 1.5)
    write_json(tmp_path / "tests.json", asdict(result))
    assert read_result(tmp_path / "tests.json") == result
    (tmp_path / "half.json").write_text('{"name": "tests"')
    (tmp_path / "other.json").write_text('{"name": "tests"}')
    assert all(read_result(tmp_path / f"{name}.json") is None for name in ("half", "other", "none"))
