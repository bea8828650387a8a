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
