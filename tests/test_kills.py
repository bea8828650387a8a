"""Sweeps of many cells under kill -9: nothing is lost, nothing is there twice, nobody outlives the sweep for long."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from entrain_bench.answers.tracking.log import SWEEP_TAG, open_client
from entrain_bench.records.records import Results
from support.processes import command, descendants_of, runs, workers_of

NUM_CELLS, NUM_KILLS, LEAST_PARENTS = 200, 20, 3
ORPHAN_S = 10.0
MAX_POLLS, POLL_S = 12_000, 0.01
SWEEP = [
    *("model=tiny", "cluster=a40x16", "global_batch=32", "microbatch_size=2", "layout.dp=2", "iterations=1"),
    *("--multirun", "strategy=megatron,entrain"),
]
LAUNCHER = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]


def processes_with(mark: str) -> set[int]:
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:
            continue
        if mark.encode() in environment and runs(int(folder.name)):
            found.add(int(folder.name))
    return found


def orphans(mark: str, known: set[int]) -> set[int]:
    return processes_with(mark) | {pid for pid in known if runs(pid)}


def partial_files(folder: Path) -> list[Path]:
    return [*folder.rglob(".*.partial")]


def records(folder: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in (folder / "runs").rglob("*.json")]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_kills_at_random_lose_and_double_nothing_and_leave_no_orphan(tmp_path: Path) -> None:
    sweep = [*SWEEP, f"seed=range(0,{NUM_CELLS // 2})", *LAUNCHER, f"results_dir={tmp_path}"]
    chance, mark = random.Random(0), f"SURVIVAL_MARK={tmp_path.name}{os.getpid()}"
    name, _, value = mark.partition("=")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), name: value}

    def start(*more: str) -> subprocess.Popen[bytes]:
        arguments = [sys.executable, "-m", "entrain_bench.cli", *sweep, *more]
        return subprocess.Popen(
            arguments, env=environment, stdout=subprocess.DEVNULL, stderr=(tmp_path / "err").open("ab")
        )

    parent, kills, parents_killed = start(), 0, 0
    before, longest_s = 0, 0.0
    while kills < NUM_KILLS:
        # Once there is something new to lose, at a moment of its own.
        # Counted, not timed, for the machine may stand still meanwhile.
        for _ in range(MAX_POLLS):
            if workers_of(parent.pid) and len(records(tmp_path)) > before:
                break
            assert parent.poll() is None, "the sweep ended before all kills"
            time.sleep(POLL_S)
        else:
            pytest.fail("nothing was done any more")
        time.sleep(chance.uniform(0, 0.3))
        before = len(records(tmp_path))
        if chance.random() < 0.4:
            known = descendants_of(parent.pid)
            parent.kill()
            killed_at = time.monotonic()
            parent.wait(60)
            while orphans(mark, known) and time.monotonic() < killed_at + ORPHAN_S:
                time.sleep(0.1)
            assert {pid: command(pid) for pid in orphans(mark, known)} == {}
            longest_s = max(longest_s, time.monotonic() - killed_at)
            parent, parents_killed = start(), parents_killed + 1
        elif workers := workers_of(parent.pid):
            os.kill(chance.choice(sorted(workers)), signal.SIGKILL)
        else:
            continue
        kills += 1
    parent.wait(1800)
    assert parents_killed >= LEAST_PARENTS
    # What was killed in the last round runs now, also what was killed twice.
    last = start("retry=failed")
    assert last.wait(1800) == 0
    found = records(tmp_path)
    assert [record["status"] for record in found] == ["ok"] * NUM_CELLS
    table = pd.read_csv(tmp_path / "table.csv")
    assert len(table) == table["key"].nunique() == NUM_CELLS
    assert not table.duplicated(["strategy", "seed"]).any()
    client = open_client(Results(tmp_path), "")
    (experiment,) = (one for one in client.search_experiments() if one.tags.get(SWEEP_TAG))
    logged = client.search_runs([experiment.experiment_id])
    assert {run.info.status for run in logged} == {"FINISHED"}
    assert len({run.info.run_name for run in logged}) == len(logged)
    assert {run.info.run_id: run.data.metrics.get("num_ok") for run in logged}[experiment.tags[SWEEP_TAG]] == NUM_CELLS
    errors = (tmp_path / "err").read_text()
    assert "Traceback" not in errors
    assert "internal error" not in errors
    assert orphans(mark, set()) == set()
    assert partial_files(tmp_path) == []
    print(f"{kills} kills, {parents_killed} of the parent, whose last process ended within {longest_s:.1f} s")
