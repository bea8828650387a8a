"""Cells under Ray: deaths cost their cell only, what is wrong is one line, and a real cluster of this machine's."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.cli import run_command
from entrain_bench.run import ray_workers
from entrain_bench.run.workers import Died
from support.jobs import double, double_or_die

SMALL = ["model=tiny", "cluster=tiny", "global_batch=16", "microbatch_size=2", "layout.tp=1", "layout.dp=2"]
SWEEP = [*SMALL, "iterations=1", "mlflow=false", "--multirun", "seed=0,1", "hydra/launcher=ray"]


@dataclass(frozen=True, eq=False)
class Task:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class FakeRay:
    """Ray as far as it is used: tasks are done when they are asked for, the last first.

    Args:
        num_cpus: what the cluster says it has.
    """

    def __init__(self, num_cpus: int = 2) -> None:
        names = ("RayError", "OutOfMemoryError", "WorkerCrashedError", "NodeDiedError", "ObjectLostError")
        base = type("RayError", (Exception,), {})
        self.exceptions = SimpleNamespace(**{name: type(name, (base,), {}) for name in names} | {"RayError": base})
        self.num_cpus, self.calls, self.most_waited_for = num_cpus, list[Any](), 0

    @contextmanager
    def own_cluster(self, num_cpus: int) -> Iterator[str]:
        self.calls.append(("start", num_cpus))
        try:
            yield "own:1"
        finally:
            self.calls.append("end")

    def init(self, address: str, **_: Any) -> None:
        self.calls.append(("init", address))
        if address == "nowhere:1":
            raise ConnectionError("what was tried\nno answer")

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": float(self.num_cpus)}

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def remote(self, max_retries: int) -> Callable[[Callable[..., Any]], Any]:
        assert max_retries == 0, "a cell that kills would be run again"
        return lambda function: SimpleNamespace(remote=lambda *arguments: Task(function, arguments))

    def wait(self, tasks: list[Task]) -> tuple[list[Task], list[Task]]:
        self.most_waited_for = max(self.most_waited_for, len(tasks))
        return tasks[-1:], tasks[:-1]

    def get(self, task: Task) -> Any:
        _, job = pickle.loads(task.arguments[0])  # noqa: S301
        if isinstance(job, str):
            raise getattr(self.exceptions, job)("where it was\nwhat it was")
        return task.function(*task.arguments)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(ray_workers, "own_cluster", fake.own_cluster)
    return fake


def test_a_worker_that_dies_costs_its_job_only(fake: FakeRay) -> None:
    jobs = [1, "WorkerCrashedError", 2, "OutOfMemoryError", "NodeDiedError", 3]
    done = dict(ray_workers.work_off(double, jobs, -1))  # type: ignore[arg-type, list-item]
    assert {job: result for job, result in done.items() if isinstance(job, int)} == {1: 2, 2: 4, 3: 6}
    assert done["WorkerCrashedError"] == done["NodeDiedError"] == Died("died")
    assert str(done["OutOfMemoryError"]).endswith("was killed by Ray, for its machine ran out of memory")
    assert fake.most_waited_for == fake.num_cpus
    assert fake.calls[-2:] == ["shutdown", "end"]


@pytest.mark.parametrize(
    ("num_processes", "address", "at_once", "calls"),
    [
        (3, None, 3, [("start", 3), ("init", "own:1"), "shutdown", "end"]),
        (3, "head:1", 3, [("init", "head:1"), "shutdown"]),
        (-1, "head:1", 2, [("init", "head:1"), "shutdown"]),
    ],
)
def test_as_many_at_once_as_are_asked_for_or_the_cluster_has(
    num_processes: int, address: str | None, at_once: int, calls: list[object], fake: FakeRay
) -> None:
    assert len([*ray_workers.work_off(double, range(9), num_processes, address)]) == 9
    assert fake.calls == calls
    assert fake.most_waited_for == at_once


def test_nothing_is_started_for_nothing_and_left_behind_by_who_stops_listening(fake: FakeRay) -> None:
    assert [*ray_workers.work_off(double, [], 1)] == []
    assert fake.calls == []
    work: Iterator[Any] = ray_workers.work_off(double, iter(range(1000)), 1)
    next(work)
    work.close()  # type: ignore[attr-defined]
    assert fake.calls[-2:] == ["shutdown", "end"]


@pytest.mark.parametrize(
    ("job", "address", "says"),
    [
        (1, "nowhere:1", "hydra/launcher=ray at nowhere:1: cannot connect to a Ray cluster (no answer)"),
        ("RayError", None, "hydra/launcher=ray: a Ray worker failed to start (what it was)"),
    ],
)
@pytest.mark.usefixtures("fake")
def test_what_keeps_ray_from_working_is_one_line(job: Any, address: str | None, says: str) -> None:
    with pytest.raises(UserError) as caught:
        [*ray_workers.work_off(double, [job], 1, address)]
    assert str(caught.value) == says


def test_ray_that_is_not_installed_is_named_with_what_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run_command([*SWEEP, f"results_dir={tmp_path / 'results'}"]) == 2
    says = "entrain-bench: hydra/launcher=ray: not installed. Run pip install -e '.[ray]'\n"
    assert capsys.readouterr().err == says
    assert not (tmp_path / "results").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_cluster_runs_a_sweep_and_loses_the_cells_of_dead_workers_only(tmp_path: Path) -> None:
    # Not imported, for Ray then reads what the environment says of it.
    if not find_spec("ray"):
        pytest.skip("needs the extra ray")
    done = dict(ray_workers.work_off(double_or_die, [1, -1, 2, -2, 3, 4], 2))
    assert done == {1: 2, -1: Died(), 2: 4, -2: Died(), 3: 6, 4: 8}
    assert run_command([*SWEEP, f"results_dir={tmp_path}", "hydra.launcher.num_cpus=2"]) == 0
    assert pd.read_csv(tmp_path / "table.csv")["status"].tolist() == ["ok", "ok"]
