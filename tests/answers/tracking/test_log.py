"""The store of a results folder shows what the records hold, once, by MLflow's own client."""

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from mlflow.entities import Experiment, Run

from entrain_bench.answers.tracking.entries import NOTE_TAG, SWEEP
from entrain_bench.answers.tracking.folder import FolderClient
from entrain_bench.answers.tracking.log import (
    ID_TAG,
    PARENT_TAG,
    SINGLE_RUNS,
    links,
    log_records,
    open_client,
)
from entrain_bench.cli import run_command
from entrain_bench.records.records import Record, Results

SMALL = ["model=tiny", "cluster=tiny", "global_batch=16", "microbatch_size=2", "layout.dp=1", "iterations=2"]
BASE = "http://127.0.0.1:5000"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A store with one run, which tests add others to: creating one takes seconds. Any folder name will do."""
    folder = tmp_path_factory.mktemp("store") / "50% of a#b?"
    assert run_command([*SMALL, f"results_dir='{folder}'"]) == 0
    return Results(folder)


def some_record(results: Results, strategy: str = "megatron", seed: int = 0, **changes: Any) -> Record:
    """A record like that of the store's run."""
    record = next(iter(results.records()))
    order = {"megatron": 0, "entrain": 1}[strategy]
    own = {**record.config["strategy"], "name": strategy, "display_order": order}
    config = {**record.config, "strategy": own, "seed": seed, **changes.pop("config", {})}
    labels = {**record.labels, "strategy": strategy, "seed": seed, **changes.pop("labels", {})}
    metrics = {**record.metrics, "iteration_time_s": changes.pop("time_s", 1.0)}
    key = hashlib.sha256(f"{strategy}{seed}{changes}".encode()).hexdigest()[:16]
    return replace(record, **{"key": key, "metrics": metrics, "config": config, "labels": labels, **changes})


def contest(results: Results, **changes: Any) -> list[Record]:
    """Two strategies at two seeds: one is twice as fast as the baseline at the first, eight times at the second."""
    times = {("megatron", 0): 4.0, ("megatron", 1): 8.0, ("entrain", 0): 2.0, ("entrain", 1): 1.0}
    return [some_record(results, name, seed, time_s=time_s, **changes) for (name, seed), time_s in times.items()]


def experiment_of(results: Results, name: str) -> Experiment:
    experiment = open_client(results, "").get_experiment_by_name(name)
    assert experiment is not None
    return experiment


def runs_of(results: Results, name: str) -> dict[str, Run]:
    """Active runs of an experiment by their names, the parent by ``SWEEP``; all are different."""
    runs: Sequence[Run] = open_client(results, "").search_runs([experiment_of(results, name).experiment_id])
    named = {SWEEP if run.data.tags[ID_TAG] == SWEEP else run.info.run_name: run for run in runs}
    assert len(named) == len(runs)
    return named


def artifacts_of(results: Results, run: Run) -> set[str]:
    """Paths of a run's artifacts, as a server finds them."""
    scheme, _, path = run.info.artifact_uri.partition(":/")
    assert scheme == "mlflow-artifacts"
    folder = results.root / "mlflow-artifacts" / path.lstrip("/")
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.wide
def test_a_sweep_is_logged_whole_and_once(tmp_path: Path) -> None:
    swept = ["strategy=megatron,entrain", "seed=0,1"]
    sweep = [*SMALL, f"results_dir={tmp_path}", "--multirun", *swept]
    assert run_command(sweep) == 0
    results, name = Results(tmp_path), " ".join([*SMALL, *swept])
    before = runs_of(results, name)[SWEEP].info.run_id
    assert run_command(sweep) == 0
    assert run_command([*SMALL, f"results_dir={tmp_path}", "seed=7"]) == 0
    runs = runs_of(results, name)
    assert runs[SWEEP].info.run_id == before
    parent = runs.pop(SWEEP)
    assert {*runs} == {"megatron", "entrain"}
    assert {run.info.status for run in (parent, *runs.values())} == {"FINISHED"}
    assert {run.data.tags[PARENT_TAG] for run in runs.values()} == {parent.info.run_id}
    pages = {"answer.html", "answer.md", "answer.json"}
    assert artifacts_of(results, parent) == {*pages, "table.json", "iteration_time.png"}
    (table,) = (tmp_path / "mlflow-artifacts").rglob("table.json")
    values = json.loads(table.read_text())
    records = {record.key: record for record in results.records()}
    assert {*pd.DataFrame(values["data"], columns=values["columns"])["key"]} < {*records}
    client = open_client(results, "")
    for name, run in runs.items():
        same = [one for one in records.values() if one.labels["strategy"] == name and one.labels["seed"] < 2]
        times = [one.metrics["iteration_time_s"] for one in sorted(same, key=lambda one: int(one.labels["seed"]))]
        history = client.get_metric_history(run.info.run_id, "iteration_time_s")
        assert [point.value for point in sorted(history, key=lambda point: point.step)] == [*times, sum(times) / 2]
        assert run.data.metrics["iteration_time_s"] == sum(times) / 2
        assert len(run.data.metrics) <= 20
        assert run.data.params.items() >= {"Strategy": name, "layout.dp": "1", "global_batch": "16"}.items()
        assert {"chosen.llm.pp", "chosen.llm.tp"} < {*run.data.params}
        assert run.data.tags["cost_source"] in ("derived", "fitted")
        assert run.data.tags["mlflow.source.name"] == "entrain-bench"
        (used,) = run.inputs.dataset_inputs
        assert used.dataset.name == same[0].labels["workload"]
        assert json.loads(used.dataset.source) == same[0].config["workload"]
        assert [(tag.key, tag.value) for tag in used.tags] == [("mlflow.data.context", "training")]
    (single,) = runs_of(results, SINGLE_RUNS).values()
    assert artifacts_of(results, single) == {"record.json", "chrome_trace.json"}


def test_a_sweep_that_changed_is_replaced_below_one_parent(store: Results) -> None:
    records = contest(store)
    assert log_records(store, records[:3], "grown") == (2, "")
    assert log_records(store, records, "grown")[0] == 2
    assert log_records(store, records, "grown")[0] == 0
    after = runs_of(store, "grown")
    assert after["entrain"].data.metrics["iteration_time_s"] == 1.5
    parent = after.pop(SWEEP)
    assert {run.data.tags[PARENT_TAG] for run in after.values()} == {parent.info.run_id}
    assert parent.data.metrics["num_runs"] == 4
    experiment = experiment_of(store, "grown")
    assert experiment.tags[NOTE_TAG] == parent.data.tags[NOTE_TAG]
    # Runs of other code are another view of the same sweep.
    assert log_records(store, contest(store, code_version="new"), "grown")[0] == 2
    assert {run.data.tags.get("code_version", "new") for run in runs_of(store, "grown").values()} == {"new"}


def test_a_sweep_that_was_interrupted_or_deleted_is_logged_again(
    store: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = contest(store)

    def broken(*_: object) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FolderClient, "set_tag", broken)
        with pytest.raises(KeyboardInterrupt):
            log_records(store, records, "broken")
    assert log_records(store, records, "broken")[0] == 2
    open_client(store, "").delete_experiment(experiment_of(store, "broken").experiment_id)
    log_records(store, records, "broken")
    assert {*runs_of(store, "broken")} == {SWEEP, "megatron", "entrain"}


def test_seeds_of_one_strategy_have_nothing_to_compare_and_are_logged(store: Results) -> None:
    records = [some_record(store, seed=seed) for seed in (0, 1)]
    assert log_records(store, records, "alone")[0] == 1
    assert experiment_of(store, "alone").tags.get(NOTE_TAG, "") == ""


def test_a_dataset_is_its_configuration_and_files(store: Results) -> None:
    workload = some_record(store).config["workload"]
    changed = [{}, {}, {"label": "Another"}, {"_target_": "os.path.Gone"}]
    for number, change in enumerate(changed):
        record = some_record(store, seed=30 + number, config={"workload": {**workload, **change}})
        log_records(store, [record], f"data {number}")
    runs = runs_of(store, SINGLE_RUNS)
    digests = [[one.dataset.digest for one in runs[f"data {n}"].inputs.dataset_inputs] for n in range(len(changed))]
    assert digests[0] == digests[1] != digests[2]
    assert digests[3] == [], "it cannot be read now"


@pytest.mark.wide
def test_a_moved_folder_has_its_artifacts_and_links(store: Results, tmp_path: Path) -> None:
    log_records(store, contest(store), "moved")
    moved = Results(tmp_path / "elsewhere")
    shutil.copytree(store.root, moved.root)
    parent = runs_of(moved, "moved")[SWEEP]
    assert artifacts_of(moved, parent) == {"answer.html", "answer.md", "answer.json", "table.json"}
    lines = links(moved, BASE, most=1)
    page = f"{BASE}/#/experiments/{experiment_of(moved, 'moved').experiment_id}/runs"
    assert [line.split() for line in lines[:-1]] == [
        ["moved"],
        ["answer:", f"{page}/{parent.info.run_id}/artifacts/answer.html?workflowType=machine_learning"],
        ["runs:", f"{page}?workflowType=machine_learning"],
    ]
    assert lines[-1] == f"all experiments: {BASE}/#/experiments?workflowType=machine_learning"


@pytest.mark.parametrize("content", [b"this is not a database", b"SQLite format 3\0" + b"x" * 5000])
def test_runs_are_recorded_even_if_the_store_is_damaged(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mlflow.db").write_bytes(content)
    assert run_command([*SMALL, f"results_dir={tmp_path}"]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "MLflow" in line]
    assert "could not be logged" in line
    assert "delete it" in line
    assert len(Results(tmp_path).records()) == 1
