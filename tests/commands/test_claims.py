"""``entrain-bench claims``: counts, one claim with its commands, the nearest name."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrain_bench.answers.documents.claim import load_claims
from entrain_bench.cli import run_command


def test_a_line_per_claim_then_counts_and_mismatches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["claims", f"results_dir={tmp_path}"]) == 0
    *lines, counts, mismatches = capsys.readouterr().out.splitlines()
    claims = load_claims()
    assert counts.startswith(f"{len(claims)} claims: as published ")
    assert mismatches.startswith(f"0 mismatches between {len(claims)} claims and ")
    assert sum(line.startswith("  ") for line in lines) == len(claims)
    assert sum("| fair " in line for line in lines) == sum(claim.fair is not None for claim in claims)
    assert any(line.startswith("Entrain, ") for line in lines)


def test_a_claim_has_its_settings_and_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Of a folder with results its own numbers, and of what it lacks that it was not measured.
    (tmp_path / "claims.json").write_text("[]")
    assert run_command(["claims", "entrain_end_to_end", f"results_dir={tmp_path}"]) == 0
    text = capsys.readouterr().out
    assert "  As published: nothing (not measured: run make claims). The paper's job, simulated" in text
    assert (
        "# fair\nentrain-bench --multirun tuning=equal layout.tp=null layout.cp=null layout.pp=null layout.dp=null"
        in text
    )


def test_a_wrong_name_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["claims", "entrain_end2end"]) == 2
    assert "claim=entrain_end2end: unknown (did you mean entrain_end_to_end?)" in capsys.readouterr().err


def test_a_group_stands_for_its_claims(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["claims", "entrain_sensitivity", f"results_dir={tmp_path}"]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    cases = [claim for claim in load_claims() if claim.group == "entrain_sensitivity"]
    assert len(cases) == 31
    assert heading.startswith("Entrain, 31 claims: as published ")
    assert [line.split()[0] for line in lines if line.startswith("  ")] == [claim.name for claim in cases]
