"""The command line: one run, sweeps, resumption, and every kind of bad input."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from entrain_bench.balancing.interface import Strategy
from entrain_bench.balancing.profile import Profile
from entrain_bench.cli import run_command
from entrain_bench.program import Program
from entrain_bench.program.layout import Layout
from entrain_bench.records.records import Results
from entrain_bench.specs.shapes import SampleShapes
from support.cli import SMALL, records, run


def test_one_run_leaves_one_record_its_timeline_and_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "strategy=entrain", "workload=chartqa") == 0
    (record,) = records(tmp_path)
    key = record["key"]
    assert record["status"] == "ok"
    table = pd.read_csv(tmp_path / "table.csv")
    assert table.loc[0, "strategy"] == "entrain"
    assert table.loc[0, "iteration_time_s"] > table.loc[0, "lower_bound_s"] > 0
    trace = json.loads(Results(tmp_path).trace_path(key).read_text())
    timeline = pd.read_parquet(Results(tmp_path).timeline_path(key))
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == len(timeline)
    assert "s/iter" in capsys.readouterr().out


def test_sweep_keeps_going_past_failed_and_skipped_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["workload=coco,librispeech", "memory_fraction=0.9,0.00001"]
    assert run(tmp_path, "--multirun", *arguments) == 1
    found = records(tmp_path)
    by_status = pd.Series([r["status"] for r in found]).value_counts().to_dict()
    assert by_status == {"ok": 1, "failed": 1, "skipped": 2}
    for record in found:
        if record["status"] == "skipped":
            assert "audio" in str(record["reason"])
        if record["status"] == "failed":
            assert "GiB" in str(record["reason"])
    assert "[4/4]" in capsys.readouterr().err


@pytest.mark.wide
def test_finished_cells_are_skipped_and_failed_ones_tried_again(tmp_path: Path) -> None:
    sweep = ["--multirun", "workload=coco,librispeech", "strategy.assigner.defer=true,3"]
    run(tmp_path, *sweep)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.json")}
    assert run(tmp_path, *sweep) == 1
    statuses = {path: json.loads(path.read_text())["status"] for path in before}
    assert {"ok", "failed"} <= {*statuses.values()}
    for path, time_ns in before.items():
        assert (path.stat().st_mtime_ns != time_ns) == (statuses[path] == "failed")


@pytest.mark.skipif(bool(importlib.util.find_spec("submitit")), reason="submitit is installed")
def test_a_launcher_that_is_not_installed_is_named_with_what_brings_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for launcher in ("submitit_local", "submitit_slurm"):
        assert run(tmp_path, "--multirun", f"hydra/launcher={launcher}", "seed=0,1") == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.endswith(f"hydra/launcher={launcher}: not installed. Run pip install -e '.[submitit]'")


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("submitit"), reason="needs the extra submitit")
def test_a_sweep_as_jobs_of_submitit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(tmp_path, "--multirun", "hydra/launcher=submitit_local", "seed=0,1", "mlflow=false") == 0
    assert pd.read_csv(tmp_path / "table.csv")["status"].tolist() == ["ok", "ok"]
    assert run(tmp_path, "--multirun", "hydra/launcher=submitit_local", "seed=0,1", "mlflow=false") == 0
    jobs = [path for path in (tmp_path / "hydra" / ".submitit").iterdir() if path.name.isdigit()]
    assert len(jobs) == 2, "finished cells are no jobs"


@pytest.mark.wide
def test_a_killed_sweep_loses_at_most_the_run_in_flight(tmp_path: Path) -> None:
    arguments = [*SMALL, f"results_dir={tmp_path}", "--multirun", "strategy=megatron,entrain", "seed=range(0,4)"]
    process = subprocess.Popen(
        [sys.executable, "-m", "entrain_bench.cli", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    runs = tmp_path / "runs"
    deadline = time.monotonic() + 60
    while len(list(runs.rglob("*.json"))) < 2:
        assert process.poll() is None, "the sweep ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    survived = {path.name: path.read_bytes() for path in runs.rglob("[0-9a-f]*.json")}
    for name, content in survived.items():
        record = json.loads(content)
        assert record["status"] == "ok"
        assert Results(tmp_path).timeline_path(name[:-5]).exists() is (record["labels"]["seed"] == 0)
    assert run_command(arguments) == 0
    finished = {path.name: path.read_bytes() for path in runs.rglob("[0-9a-f]*.json")}
    assert len(finished) == 8
    assert all(finished[name] == content for name, content in survived.items())


def test_compilation_is_not_charged_to_the_first_iteration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[SampleShapes, Layout]] = []
    whole = Strategy.program

    def make(self: Strategy, shapes: SampleShapes, layout: Layout, profile: Profile) -> Program:
        made.append((shapes, layout))
        return whole(self, shapes, layout, profile)

    def plan(self: Strategy, profile: Profile) -> Layout:
        layout = planned(self, profile)
        made.clear()
        return layout

    planned = Strategy.plan
    monkeypatch.setattr("entrain_bench.run.experiment._warm", set())
    monkeypatch.setattr(Strategy, "program", make)
    monkeypatch.setattr(Strategy, "plan", plan)
    assert run(tmp_path, "strategy=entrain") == 0
    # What the parts compile, the first call compiles: it sees as many samples, and its time is no iteration's.
    (unmeasured, first_layout), (measured, second_layout) = made
    assert len(unmeasured) == len(measured) == 32
    assert first_layout is second_layout
    (record,) = records(tmp_path)
    assert len(record["iterations"]) == 1  # type: ignore[arg-type]
