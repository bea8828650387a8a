"""The calibration document: what it computes from runs, and what it says without them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entrain_bench.lab.calibration import page as calibration
from entrain_bench.lab.calibration.anchors import Anchors, load_anchors
from entrain_bench.lab.calibration.page import calibration_output, model_error, write_calibration
from entrain_bench.records.records import Results
from entrain_bench.run.study import Study

ANCHORS = load_anchors()


def few(*names: str) -> Anchors:
    """Small runs of a few groups, without ranges and toggles."""
    kept = tuple(each for each in ANCHORS.iterations if each.group.name in names and each.gpus <= 64)
    return replace(ANCHORS, iterations=kept, forwards=(), toggles={"full clock": ANCHORS.toggles["full clock"]})


def test_the_model_error_is_median_and_worst_of_the_sizes() -> None:
    assert model_error([0.01, -0.04, 0.02]) == (
        "model error: median 2.0%, worst 4.0% over 3 published iteration times of language models"
    )
    assert model_error([]) == "model error: not measured"


def test_what_is_published_twice_a_size_shows_how_it_scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    anchors = few("Llama 3.1 8B")
    seconds: dict[Any, float] = dict(zip([each.overrides for each in anchors.iterations], (13.0, 13.26), strict=True))
    monkeypatch.setattr(calibration, "_predicted_s", lambda overrides, _: seconds.get(overrides, 6.5))
    problem = write_calibration(anchors, Study(Results(tmp_path)))
    text = (tmp_path / "calibration.md").read_text()
    assert "2 of" not in problem
    assert "not run" in problem
    assert "| Llama 3.1 8B (H100) | 8 | 1 | 2 | 1 | 1 | 128 | 1 | 12.91 | 13.00 | +0.7% | fit |" in text
    assert "| Llama 3.1 8B | 8 to 64 | +1.3% | +2.0% | +0.7 |" in text
    assert "| Llama 3.1 8B, 8 GPUs | -50.0% |" in text
    assert "**Model error: median 1.0%, worst 1.4% over 2 published iteration times of language models**" in text


def test_runs_make_the_document(tmp_path: Path) -> None:
    from entrain_bench.run.cells import run_cells

    anchors = few("Nemotron-4 15B")
    study = Study(Results(tmp_path))
    assert "not run" in write_calibration(anchors, study)
    cells = study.cells_by_key(anchors.runs)
    assert all(done.record and done.record.status == "ok" for done in run_cells(cells.values(), study.results))
    problem = write_calibration(anchors, study)
    # Of other rows than all of them, so what figures say cannot hold.
    assert problem.startswith("figures/_style.py: MODEL_ERROR must be 'model error: median")
    assert "not run" not in (tmp_path / "calibration.md").read_text()


def test_every_run_of_the_output_composes() -> None:
    output = calibration_output()
    assert output.committed == ["calibration.md"]
    assert len({*output.sweeps}) >= len(ANCHORS.runs) - 2  # Both LLMs' ranges share a run of a workload.
