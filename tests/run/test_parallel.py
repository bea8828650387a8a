"""Tasks in processes and on Ray: all are done, a death costs its task only, nothing is left running."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.cli import run_command
from entrain_bench.run.parallel import Died, RayCluster, run_parallel
from support.jobs import double, double_or_die, process_and_threads
from support.processes import descendants_of, eventually, own_workers, runs, workers_of

SMALL = ["model=tiny", "cluster=tiny", "global_batch=16", "microbatch_size=2", "layout.tp=1", "layout.dp=2"]
SWEEP = [*SMALL, "iterations=1", "mlflow=false", "--multirun", "seed=0,1"]
# How soon a sweep ends after Ctrl-C, and how soon its workers after a kill, on a busy machine.
INTERRUPT_S = 3.0


@pytest.mark.wide
def test_every_task_is_done_once_by_at_most_so_many_processes() -> None:
    assert dict(run_parallel(double, range(7), 2)) == {number: 2 * number for number in range(7)}
    results = [result for _, result in run_parallel(process_and_threads, range(6), 2)]
    processes = {result[0] for result in results if not isinstance(result, Died)}
    assert len(processes) == 2
    assert os.getpid() not in processes
    # They stay, so that the next call need not start others.
    again = [result for _, result in run_parallel(process_and_threads, range(2), 2)]
    assert {result[0] for result in again if not isinstance(result, Died)} <= processes
    assert list(run_parallel(double, [], 2)) == []


def test_a_process_that_dies_costs_its_task_only() -> None:
    done = dict(run_parallel(double_or_die, [1, -1, 2, -2, 3, 4], 2))
    assert done == {1: 2, -1: Died(), 2: 4, -2: Died(), 3: 6, 4: 8}


@pytest.mark.parametrize("idle", [True, False])
def test_a_process_that_is_killed_from_outside_costs_its_task_if_it_has_one(idle: bool) -> None:
    def tasks() -> Iterator[int]:
        yield 1
        for worker in own_workers():
            os.kill(worker, signal.SIGKILL)
        # Until that is noticed.
        time.sleep(0.5)
        yield 2

    done = dict(run_parallel(process_and_threads, tasks(), 1 if idle else 2))
    assert [done[task] == Died() for task in (1, 2)] == [not idle, False]


def test_a_process_works_where_its_task_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [*run_parallel(double, [1], 1)]
    (tmp_path / "module_of_a_task.py").write_text("import os\nclass Mine:\n    pass\ndef here(_): return os.getcwd()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("module_of_a_task")
    assert [result for _, result in run_parallel(module.here, [module.Mine()], 1)] == [str(tmp_path)]


def test_who_stops_listening_leaves_no_process_at_work() -> None:
    before = own_workers()
    for _ in run_parallel(process_and_threads, iter(range(1000)), 2):
        break
    assert eventually(lambda: len(own_workers() - before) <= 1)


PARENT = """
from entrain_bench.run.parallel import run_parallel
from support.jobs import {job}
for _ in run_parallel({job}, [1, 2], 2):
    pass
"""


@pytest.mark.wide
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_processes_end_with_the_one_that_started_them(number: signal.Signals) -> None:
    path = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", PARENT.format(job="wait_forever")]
    parent = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE)
    assert eventually(lambda: len(workers_of(parent.pid)) == 2)
    # A terminal does the same.
    workers = workers_of(parent.pid)
    for process in (*workers, parent.pid) if number is signal.SIGINT else (parent.pid,):
        os.kill(process, number)
    started = time.monotonic()
    _, errors = parent.communicate(timeout=60)
    assert eventually(lambda: not any(map(runs, workers)))
    assert time.monotonic() - started < INTERRUPT_S
    assert errors.count(b"KeyboardInterrupt") == (number is signal.SIGINT), "a worker saw Ctrl-C"


@pytest.mark.wide
def test_an_interrupted_sweep_ends_at_once_and_keeps_what_was_finished(tmp_path: Path) -> None:
    words = [*SMALL, "iterations=1", "mlflow=false", "--multirun", "seed=range(0,400)", f"results_dir={tmp_path}"]
    command = [sys.executable, "-m", "entrain_bench.cli", *words, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    sweep = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert eventually(lambda: len([*(tmp_path / "runs").rglob("*.json")]) > 2)
    processes = descendants_of(sweep.pid)
    started = time.monotonic()
    sweep.send_signal(signal.SIGINT)
    _, errors = sweep.communicate(timeout=60)
    assert time.monotonic() - started < INTERRUPT_S
    assert sweep.returncode == 130
    assert errors.splitlines()[-1] == "interrupted; finished parts are kept"
    assert eventually(lambda: not any(map(runs, processes)))
    assert len(pd.read_csv(tmp_path / "table.csv")) == len([*(tmp_path / "runs").rglob("*.json")])


@pytest.fixture
def ray_installed() -> None:
    # Not imported, for Ray then reads what the environment says of it.
    if not find_spec("ray"):
        pytest.skip("Ray is not installed: pip install -e '.[ray]'")


@pytest.mark.wide
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("ray_installed")
def test_a_local_ray_runs_a_sweep_and_ends_with_a_dead_worker(tmp_path: Path) -> None:
    assert dict(run_parallel(double, range(7), 2, RayCluster())) == {number: 2 * number for number in range(7)}
    with pytest.raises(UserError, match="hydra/launcher=ray, address=None: Ray failed"):
        [*run_parallel(double_or_die, [1, -1, 2, 3], 2, RayCluster())]
    sweep = [*SWEEP, "hydra/launcher=ray", f"results_dir={tmp_path}"]
    assert run_command([*sweep, "hydra.launcher.num_cpus=2"]) == 0
    assert len(pd.read_csv(tmp_path / "table.csv")) == 2
