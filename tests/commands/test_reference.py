"""The committed results: computed anew, compared, and brought up to date, with a word on every change."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.base.files import write_atomically
from entrain_bench.cli import run_command
from entrain_bench.commands import reference, verify
from entrain_bench.records.tables import parquet_of
from entrain_bench.run.study import Output, Study

# Iterations of a second, which no assignment outlasts.
SWEEP = ("strategy=megatron,entrain", "iterations=1", "cluster=a40x16", "global_batch=64")


def write(study: Study) -> str:
    shown = "\n".join(f"{cell.config.strategy['name']}" for cell in study.cells(*SWEEP))
    for name in ("figures/some.csv", "figures/some.pdf", "some.md", "tables/shown.md"):
        write_atomically(study.results.root / name, shown.encode())
    return study.problem(*SWEEP)


# A page with a table, and one without.
PAGES = {"page.md": "Text.\n<!-- table: shown -->\n<!-- end -->\n", "README.md": "Text.\n"}
OUTPUT = Output("some", [SWEEP], write, ["figures/some.csv", "figures/some.pdf", "some.md"])


class Checkout:
    """A repository: what is committed, and runs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.options = [f"reference_dir={root / 'reference'}", f"docs_dir={root / 'docs'}"]

    def command(self, name: str) -> int:
        more = [f"results_dir={self.root / 'results'}"] if name == "reference" else []
        return run_command([name, *self.options, *more])


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Checkout:
    for module in (reference, verify):
        monkeypatch.setattr(module, "reference_outputs", lambda: [OUTPUT])
    monkeypatch.setattr("entrain_bench.commands.outputs.num_processes", lambda: 0)
    monkeypatch.setattr("entrain_bench.commands.outputs.log_to_mlflow", lambda *_: None)
    for folder in ("reference", "docs/strategies"):
        (tmp_path / folder).mkdir(parents=True)
    for name, text in PAGES.items():
        (tmp_path / "docs" / "strategies" / name).write_text(text)
    (tmp_path / "docs" / "costs.md").write_text("<!-- table: beliefs --><!-- end -->")
    found = Checkout(tmp_path)
    assert found.command("reference") == 0
    shown = capsys.readouterr().out
    for line in (
        "some.csv: new",
        "some.md: new",
        "page.md: differs",
        "costs.md: differs",
        "megatron",
        ": new",
        "6 changes",
    ):
        assert line in shown
    assert ".pdf" not in shown
    assert "README.md" not in shown
    return found


@pytest.mark.wide
def test_what_was_just_made_has_no_drift(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    assert (checkout.root / "docs" / "some.md").read_text() == "megatron\nentrain"
    page = (checkout.root / "docs" / "strategies" / "page.md").read_text()
    assert page == "Text.\n<!-- table: shown -->\n\nmegatron\nentrain\n\n<!-- end -->\n"
    beliefs = (checkout.root / "docs" / "costs.md").read_text()
    assert "| megatron | 1 |" in beliefs
    assert "| entrain | 1 |" in beliefs
    assert not (checkout.root / "docs" / "shown.md").exists()
    assert (checkout.root / "reference" / "figures" / "some.pdf").exists()
    assert len(pd.read_parquet(checkout.root / "reference" / "table.parquet")) > 0
    assert checkout.command("verify") == 0
    assert capsys.readouterr().out.startswith("0 drifts from")
    before = {
        path: path.stat().st_mtime_ns
        for folder in ("reference", "docs")
        for path in (checkout.root / folder).rglob("*.*")
    }
    assert checkout.command("reference") == 0
    assert capsys.readouterr().out == "0 changes\n"
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.wide
def test_every_drift_is_named(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    table = checkout.root / "reference" / "table.parquet"
    old, runs = table.read_bytes(), pd.read_parquet(table)
    megatron = runs["strategy"] == "megatron"
    (value,) = runs[megatron]["iteration_time_s"]
    runs.loc[megatron, "iteration_time_s"] = 9.5
    table.write_bytes(parquet_of(runs))
    (checkout.root / "docs" / "some.md").write_text("by hand")
    (checkout.root / "reference" / "figures" / "some.csv").write_text("by hand")
    page = checkout.root / "docs" / "strategies" / "page.md"
    text = page.read_text()
    page.write_text(text.replace("megatron", "by hand"))
    # Other fonts are no other results.
    (checkout.root / "reference" / "figures" / "some.pdf").write_text("drawn elsewhere")
    assert checkout.command("verify") == 1
    shown = capsys.readouterr().out
    assert f"megatron opencqa_ocr qwen25vl_llama3_1b a40x16 0: iteration_time_s 9.5 -> {value}" in shown
    assert "some.md: differs" in shown
    assert "some.csv: differs" in shown
    assert "page.md: differs" in shown
    assert "4 drifts" in shown
    assert (checkout.root / "docs" / "some.md").read_text() == "by hand"
    assert checkout.command("reference") == 0
    assert "4 changes" in capsys.readouterr().out
    assert table.read_bytes() == old
    assert page.read_text() == text


@pytest.mark.wide
def test_a_failure_leaves_the_reference_as_it_was(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise UserError("told so")

    monkeypatch.setattr("entrain_bench.run.cells.run_experiment", fail)
    before = (checkout.root / "reference" / "table.parquet").read_bytes()
    for path in (checkout.root / "results" / "runs").rglob("*.json"):
        path.unlink()
    assert checkout.command("reference") == 1
    assert "are unchanged" in capsys.readouterr().err
    assert (checkout.root / "reference" / "table.parquet").read_bytes() == before
    assert checkout.command("verify") == 1
    assert "some cells have no result" in capsys.readouterr().out
