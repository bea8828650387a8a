"""A sweep of 200 cells under kill -9: nothing is lost, nothing is there twice, nobody outlives the sweep for long."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from support.processes import runs, workers_of

NUM_CELLS, NUM_KILLS = 200, 20
ORPHAN_S = 10.0
MAX_POLLS, POLL_S = 12_000, 0.01
SWEEP = [
    *("model=tiny", "cluster=a40x16", "global_batch=32", "microbatch_size=2", "layout.dp=2", "iterations=1"),
    *("--multirun", "strategy=megatron,entrain", f"seed=range(0,{NUM_CELLS // 2})"),
    *("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"),
]


def processes_with(mark: str) -> set[int]:
    """Processes that run and were given a mark in their environment."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:
            continue
        if mark.encode() in environment and runs(int(folder.name)):
            found.add(int(folder.name))
    return found


def records(folder: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in (folder / "runs").glob("*.json")]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kills_at_random_lose_and_double_nothing_and_leave_no_orphan(tmp_path: Path) -> None:
    chance, mark = random.Random(0), f"SURVIVAL_MARK={tmp_path.name}{os.getpid()}"  # noqa: S311
    name, _, value = mark.partition("=")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), name: value}

    def start(*more: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "entrain_bench.cli", *SWEEP, f"results_dir={tmp_path}", *more]
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=(tmp_path / "err").open("ab")
        )

    parent, kills, parents_killed = start(), 0, 0
    before = 0
    while kills < NUM_KILLS:
        # Once there is something new to lose, at a moment of its own.
        # Counted, not timed, for the machine may stand still meanwhile.
        for _ in range(MAX_POLLS):
            if len(workers_of(parent.pid)) == 2 and len(records(tmp_path)) > before:
                break
            assert parent.poll() is None, "the sweep ended before all kills"
            time.sleep(POLL_S)
        else:
            pytest.fail("nothing was done any more")
        time.sleep(chance.uniform(0, 0.3))
        before = len(records(tmp_path))
        if chance.random() < 0.4:
            parent.kill()
            parent.wait(60)
            killed_at = time.monotonic()
            while processes_with(mark) and time.monotonic() < killed_at + ORPHAN_S:
                time.sleep(0.1)
            assert processes_with(mark) == set()
            parent, parents_killed = start(), parents_killed + 1
        elif workers := sorted(workers_of(parent.pid)):
            os.kill(chance.choice(workers), signal.SIGKILL)
        else:
            continue
        kills += 1
    parent.wait(600)
    assert parents_killed >= 3
    # What was killed in the last round runs now, also what was killed twice.
    last = start("retry=failed")
    assert last.wait(600) == 0
    found = records(tmp_path)
    assert [record["status"] for record in found] == ["ok"] * NUM_CELLS
    table = pd.read_csv(tmp_path / "table.csv")
    assert len(table) == table["key"].nunique() == NUM_CELLS
    assert not table.duplicated(["strategy", "seed"]).any()
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        statement = "SELECT value, COUNT(*) FROM tags WHERE key = 'entrain_bench.key' GROUP BY value"
        logged = dict(database.execute(statement).fetchall())
    assert logged == {**dict.fromkeys((record["key"] for record in found), 1), "sweep": 1}
    errors = (tmp_path / "err").read_text()
    assert "Traceback" not in errors
    assert "internal error" not in errors
    assert processes_with(mark) == set()
