"""Values of iterations are in MLflow while a run trains; afterwards its record's run takes their place."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from entrain_bench.answers.tracking.log import SINGLE_RUNS, open_client
from entrain_bench.base.errors import UserError
from entrain_bench.commands import live as live_module
from entrain_bench.commands.live import LIVE_TAG, LiveRun, Reporter, line_of
from entrain_bench.commands.publish import separately
from entrain_bench.records.metrics import DEVICE_TYPE
from entrain_bench.records.records import Results

VALUES = {"loss": 2.5, "tokens_per_s": 1234.4, "balance": 1.256, "peak_memory_bytes": 3.0 * 2**30, "grad_norm": 1.0}


def test_a_line_has_what_people_watch() -> None:
    assert line_of(VALUES) == "loss 2.5000, 1,234 tokens/s, balance 1.26, 3.0 GiB"
    assert line_of({"balance": 1.0}) == "balance 1.00"


@pytest.fixture
def live(tmp_path: Path) -> LiveRun:
    return LiveRun(Results(tmp_path), "", "entrain on chartqa", {"seed": "0"})


def runs_of(folder: Path) -> list[Any]:
    client = open_client(Results(folder), "")
    known = client.get_experiment_by_name(SINGLE_RUNS)
    return [*client.search_runs([known.experiment_id])] if known else []


@pytest.mark.wide
@pytest.mark.parametrize("failed", [False, True])
def test_values_are_there_during_a_run_and_stay_after_a_failure_only(
    live: LiveRun, tmp_path: Path, *, failed: bool
) -> None:
    live.log(0, VALUES)
    live.log(1, VALUES | {"loss": 2.0})
    deadline = time.monotonic() + 60
    while not (found := [run for run in runs_of(tmp_path) if run.data.metrics.get("loss") == 2.0]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (run,) = found
    assert (run.info.status, run.data.tags[LIVE_TAG], run.data.params["seed"]) == ("RUNNING", "true", "0")
    live.end(failed=failed)
    assert [run.info.status for run in runs_of(tmp_path)] == (["FAILED"] if failed else [])


@pytest.mark.wide
def test_tensorboard_has_the_values_of_iterations(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reporter = Reporter("tensorboard", tmp_path, "entrain on chartqa", {"seed": "0"})
    assert not [*tmp_path.iterdir()]
    reporter.log(0, VALUES)
    reporter.log(1, VALUES | {"loss": 2.0})
    reporter.end(failed=False)
    (folder,) = (tmp_path / "tensorboard").iterdir()
    found = events.EventAccumulator(str(folder))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(0, 2.5), (1, 2.0)]


def test_wandb_has_the_values_of_iterations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Mock()
    monkeypatch.setattr(live_module, "find_spec", lambda _: True)
    monkeypatch.setattr(live_module, "import_module", lambda name: Mock(init=run.init) if name == "wandb" else None)
    reporter = Reporter("wandb", tmp_path, "entrain on chartqa", {"seed": "0"})
    reporter.end(failed=True)
    assert not run.mock_calls
    reporter.log(3, VALUES)
    reporter.end(failed=True)
    project = {"project": "entrain-bench", "name": "entrain on chartqa", "config": {"seed": "0"}, "dir": str(tmp_path)}
    assert run.mock_calls == [call.init(**project), call.init().log(VALUES, 3), call.init().finish(1)]


@pytest.mark.parametrize(
    ("tracker", "message"),
    [("comet", "^harness.report_to=comet: unknown"), ("wandb", "^harness.report_to=wandb: is not installed. Run pip")],
)
def test_a_tracker_that_is_not_there_is_refused(
    tracker: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_module, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=message):
        Reporter(tracker, tmp_path, "", {})


def test_runs_on_a_cpu_are_not_in_one_table() -> None:
    def record(strategy: str, device: str) -> Any:
        return SimpleNamespace(config={"strategy": strategy}, execution={DEVICE_TYPE: device})

    cpu = [record("a", "cpu"), record("b", "cpu"), record("a", "cpu")]
    assert separately(cpu) == [[cpu[0], cpu[2]], [cpu[1]]]
    gpu = [record("a", "cuda"), record("b", "cuda")]
    assert separately(gpu) == [gpu]
