"""The verb ``ledger`` on a user's own table."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from entrain_bench.cli import run_command
from entrain_bench.config.constants import read_draws
from entrain_bench.lab.ledger import study
from entrain_bench.lab.ledger.jobs import Book
from support.ledger import STATED


def write(path: Path, **changes: str) -> Path:
    values = {**STATED, **changes}
    path.write_text(",".join(values) + "\n" + ",".join(values.values()) + "\n")
    return path


def test_own_measurements_are_predicted_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "mine.csv", step_time_s="9.1", peak_memory_gib="40")
    assert run_command(["ledger", f"ledger={path}", f"results_dir={tmp_path}"]) == 0
    (line,) = pd.read_csv(tmp_path / "ledger.csv").to_dict("records")
    assert (line["source"], line["row"], line["status"]) == ("mine", 2, "predicted")
    assert line["predicted_s"] / line["published_s"] == pytest.approx(line["ratio"], rel=1e-4)
    assert {file.suffix for file in (tmp_path / "figures").iterdir()} == {".pdf", ".png", ".csv"}
    assert "median ratio" in capsys.readouterr().out


def test_a_fit_prints_constants_and_writes_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Book, "tables", property(lambda _: ()))
    monkeypatch.setattr(study, "plan_forwards", lambda _: ())
    monkeypatch.setattr(study, "read_kernels", tuple)
    path, drawn = write(tmp_path / "mine.csv"), tmp_path / "posterior.csv"
    given = [f"ledger={path}", f"results_dir={tmp_path}", f"posterior={drawn}"]
    assert run_command(["ledger", *given, "fit=true"]) == 0
    said = capsys.readouterr().out
    assert "Fitted constants" in said
    assert "device.sustained_fraction" in said
    assert "Each source left out of the fit: Sources" in said
    draws = read_draws(drawn)
    assert {name: len(each) for name, each in draws.items()} == {"A100-SXM-80GB": 50}
