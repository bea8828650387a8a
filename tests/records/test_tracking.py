"""MLflow shows what the records hold, once, with sweeps nested under a parent."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from entrain_bench.cli import run_command
from entrain_bench.records.records import Record, Results
from entrain_bench.records.tracking import EXPERIMENT, KEY_TAG, log_records, store_uri

SMALL = ["model=tiny", "cluster=tiny", "global_batch=16", "microbatch_size=2", "layout.dp=1", "iterations=1"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A store with one run, which tests add others to: creating one takes seconds. Any folder name will do."""
    folder = tmp_path_factory.mktemp("store") / "50% of a#b?"
    assert run_command([*SMALL, f"results_dir='{folder}'"]) == 0
    assert (folder / "mlflow.db").exists()
    return Results(folder)


def only_record(results: Results) -> Record:
    (record,) = results.records()
    return record


def logged(results: Results, key: str) -> Run:
    """The one run of a record."""
    client = MlflowClient(tracking_uri=store_uri(results))
    experiment = client.get_experiment_by_name(EXPERIMENT)
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id], filter_string=f"tags.`{KEY_TAG}` = '{key}'")
    return run


def test_each_record_is_one_run_nested_under_its_sweep_with_all_it_holds(tmp_path: Path) -> None:
    sweep = [*SMALL, f"results_dir={tmp_path}", "--multirun", "workload=coco,librispeech", "seed=0,1"]
    assert run_command(sweep) == 0
    assert run_command(sweep) == 0
    assert run_command([*SMALL, f"results_dir={tmp_path}", "seed=7"]) == 0
    results = Results(tmp_path)
    client = MlflowClient(tracking_uri=store_uri(results))
    experiment = client.get_experiment_by_name(EXPERIMENT)
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert {run.info.status for run in runs} == {"FINISHED"}
    keyed = {run.data.tags[KEY_TAG]: run for run in runs if KEY_TAG in run.data.tags}
    assert set(keyed) == {record.key for record in results.records()}
    (parent,) = [run for run in runs if KEY_TAG not in run.data.tags]
    parents = [run.data.tags.get("mlflow.parentRunId") for run in keyed.values()]
    assert parents.count(parent.info.run_id) == 4
    assert parents.count(None) == 1
    for key, run in keyed.items():
        record = json.loads(results.record_path(key).read_text())
        means = {name: value for name, value in run.data.metrics.items() if not name.startswith("iteration/")}
        assert means == pytest.approx(record["metrics"])
        assert {f"iteration/{name}" for row in record["iterations"] for name in row} == set(run.data.metrics) - set(
            means
        )
        assert run.data.params["workload"] == record["labels"]["workload"]
        assert run.data.tags["status"] == record["status"]
        names = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
        assert names == ({"config.yaml", "chrome_trace"} if record["labels"]["seed"] == 7 else {"config.yaml"})


def test_a_run_in_a_folder_of_any_name_is_logged(store: Results) -> None:
    record = only_record(store)
    assert logged(store, record.key).data.metrics.items() >= dict(record.metrics).items()


def test_every_iteration_is_a_step(store: Results) -> None:
    losses = [3.0, 2.5, 2.0]
    rows = tuple({"loss": loss} for loss in losses)
    assert log_records(store, [replace(only_record(store), key="1" * 16, iterations=rows * 400)], "") == 1
    client = MlflowClient(tracking_uri=store_uri(store))
    history = client.get_metric_history(logged(store, "1" * 16).info.run_id, "iteration/loss")
    assert [m.value for m in sorted(history, key=lambda m: m.step)] == losses * 400, "more than one batch holds"


def test_a_run_that_failed_and_then_succeeded_shows_its_success(store: Results) -> None:
    record = only_record(store)
    failed = replace(record, key="0" * 16, status="failed", reason="disk full", metrics={})
    assert log_records(store, [failed], "") == 1
    assert log_records(store, [replace(failed, status="ok", metrics=record.metrics)], "") == 1
    run = logged(store, failed.key)
    assert run.info.status == "FINISHED"
    assert run.data.metrics.items() >= dict(record.metrics).items()


def test_a_run_of_more_parameters_than_a_batch_takes_is_logged(store: Results) -> None:
    record = only_record(store)
    many = {f"p{index}": index for index in range(150)}
    config = {**record.config, "workload": {**record.config["workload"], **many}}
    assert log_records(store, [replace(record, key="2" * 16, config=config)], "") == 1
    params = logged(store, "2" * 16).data.params
    assert {params[f"workload.p{index}"] for index in range(150)} == {str(index) for index in range(150)}


def test_runs_are_recorded_even_if_mlflow_breaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"this is not a database")
    assert run_command([*SMALL, f"results_dir={tmp_path}"]) == 0
    assert "could not be logged to MLflow" in capsys.readouterr().err
    assert len(Results(tmp_path).records()) == 1
