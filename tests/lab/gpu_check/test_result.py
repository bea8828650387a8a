"""Losses and iteration times as the check judges them: by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from entrain_bench.lab.gpu_check.result import (
    FAILED,
    PASSED,
    Finding,
    StepResult,
    judge_losses,
    speedup_rows,
    timing_row,
)

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
    (row,) = judge_losses({"entrain": losses}, REFERENCE, 2e-4)
    assert row["verdict"] == verdict
    assert row["largest_difference"] == pytest.approx(difference, rel=1e-6, abs=1e-12, nan_ok=True)


def test_nothing_equals_a_reference_that_is_not_there() -> None:
    assert judge_losses({"entrain": []}, [], 1.0)[0]["verdict"] == FAILED
    assert judge_losses({"entrain": [1.0]}, [math.nan], 1.0)[0]["verdict"] == FAILED


def test_the_first_iteration_warms_up() -> None:
    row = timing_row("coco", "dip", "llm tp1", [100.0, 2.0, 4.0], [50.0, 3.0, 3.6])
    assert row["measured_s"] == 3.0
    assert row["predicted_s"] == pytest.approx(3.3)
    assert row["error"] == pytest.approx(0.1)
    assert "predicted_s" not in timing_row("coco", "dip", "llm tp1", [100.0, 2.0, 4.0], [])


def test_speed_ups_are_measured_and_predicted() -> None:
    slow = timing_row("coco", "megatron", "", [9.0, 4.0, 4.4, 3.6], [9.0, 4.0, 4.0, 4.0])
    fast = timing_row("coco", "entrain", "", [9.0, 2.0, 2.2, 1.8], [9.0, 2.5, 2.5, 2.5])
    other = timing_row("chartqa", "megatron", "", [9.0, 1.0, 1.0, 1.0], [9.0, 1.0, 1.0, 1.0])
    (pair,) = speedup_rows([slow, fast, other], 2)
    assert (pair["workload"], pair["slow"], pair["fast"]) == ("coco", "megatron", "entrain")
    assert pair["measured_speedup"] == pytest.approx(2.0)
    assert pair["predicted_speedup"] == pytest.approx(1.6)
    assert pair["error"] == pytest.approx(-0.2)
    assert speedup_rows([slow], 2) == []
    assert speedup_rows([slow, other], 2) == []


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    result = StepResult(
        "tests", "x", Finding(PASSED, "fine", {"Tests": [{"test": "a", "seconds": 0.5}]}, {"t": "x"}), 1.5
    )
    result.write(tmp_path / "tests.json")
    assert StepResult.read(tmp_path / "tests.json") == result
    (tmp_path / "half.json").write_text('{"name": "tests"')
    (tmp_path / "other.json").write_text('{"name": "tests"}')
    assert all(StepResult.read(tmp_path / f"{name}.json") is None for name in ("half", "other", "none"))
