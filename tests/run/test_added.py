"""Metrics: registered where they are defined, described on their page, and added in a folder of the user's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest

from entrain_bench.cli import run_command
from entrain_bench.records.metrics import KNOWN
from entrain_bench.records.records import MEASURED, METRICS, Results

SMALL = ["model=tiny", "cluster=tiny", "global_batch=16", "microbatch_size=2", "layout.tp=1", "layout.dp=2"]
PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
MINE = """
from entrain_bench import metric


@metric("longest_pass_s", unit="s", better="low")
def longest_pass(run):
    passes = run.program.is_pass
    return float((run.timeline.end_s - run.timeline.start_s)[passes].max())


@metric("peak_again_bytes", unit="bytes")
def peak_again(run):
    return float(run.timeline.peak_memory_bytes.max())
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine" / "metrics").mkdir(parents=True)
    (tmp_path / "mine" / "metrics" / "passes.py").write_text(MINE)
    return tmp_path / "mine"


def run(results: Path, *words: str, folder: Path | None = None) -> pd.DataFrame:
    named = ["--config-dir", str(folder)] if folder else []
    assert run_command([*SMALL, "mlflow=false", f"results_dir={results}", *words, *named]) == 0
    return pd.read_csv(results / "table.csv").set_index("seed")


def test_every_metric_is_on_the_page_with_its_unit() -> None:
    text = PAGE.read_text()
    rows = [line.strip("| ").split("|") for line in text.splitlines() if line.startswith("| `")]
    units = {
        name: row[-1].strip().split(", ")[min(place, row[-1].count(","))]
        for row in rows
        for place, name in enumerate(re.findall(r"`(\w+)`", row[0]))
    }
    named = [one for one in KNOWN.values() if not one.name.startswith("time_")]
    assert {one.name: units.get(one.name) for one in named} == {one.name: one.unit for one in named}
    assert all(f"`{one.name}`" in text for one in KNOWN.values())


@pytest.mark.wide
def test_a_metric_of_a_folder_is_a_column_of_its_runs_and_no_part_of_their_key(mine: Path, tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", "iterations=2")
    added = run(tmp_path / "added", "iterations=2", folder=mine)
    assert {*added} - {*plain} == {"longest_pass_s", "peak_again_bytes"}
    assert [*added].index("longest_pass_s") == [*plain].index(METRICS[-1]) + 1
    assert (added["key"] == plain["key"]).all()
    assert (added["peak_again_bytes"] == added["peak_memory_bytes"]).all()
    (record,) = Results(tmp_path / "added").records()
    assert [row["longest_pass_s"] > 0 for row in record.iterations] == [True, True]
    # Whoever reads the folder needs no code of its author.
    assert run_command(["verify", f"results_dir={tmp_path / 'added'}", "--config-dir", str(mine)]) == 0


@pytest.mark.wide
def test_runs_without_a_new_metric_run_again_and_keep_their_timelines(mine: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    sweep = ["--multirun", "seed=0,1", "workload=coco", "iterations=1"]
    before = run(results, *sweep)
    kept = sorted((results / "timelines").rglob("*.parquet"))
    after = run(results, *sweep, folder=mine)
    assert after["longest_pass_s"].notna().all()
    simulated = [name for name in METRICS if name not in MEASURED and before[name].notna().any()]
    simulated = [name for name in simulated if name not in ("samples_per_s", "tokens_per_s", "tflops_per_gpu", "mfu")]
    assert (after[simulated] == before[simulated]).all().all()
    assert sorted((results / "timelines").rglob("*.parquet")) == kept
    written = {path: path.stat().st_mtime_ns for path in results.rglob("runs/*/*.json")}
    run(results, *sweep, folder=mine)
    assert {path: path.stat().st_mtime_ns for path in results.rglob("runs/*/*.json")} == written
    assert run_command(["verify", f"results_dir={results}", "--config-dir", str(mine)]) == 0


@pytest.mark.wide
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import no_such_module", "cannot be imported"),
        (MINE.replace("longest_pass_s", "mfu"), "metric mfu: must have a name that no other metric has"),
    ],
)
def test_a_metric_that_cannot_be_is_one_line(
    text: str, says: str, mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (mine / "metrics" / "passes.py").write_text(text)
    words: Sequence[str] = [*SMALL, f"results_dir={tmp_path / 'r'}", "--config-dir", str(mine)]
    for multirun in ([], ["--multirun"]):
        assert run_command([*words, *multirun]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert says in line
        assert "passes.py" in line
    assert not [*(tmp_path / "r").rglob("runs/*/*.json")]
