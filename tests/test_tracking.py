"""MLflow shows what the records hold, once, with sweeps nested under a parent."""

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient

from entrain_bench.cli import run_command
from entrain_bench.records import Results
from entrain_bench.tracking import EXPERIMENT, KEY_TAG, store_uri

SMALL = ["model=tiny", "cluster=tiny", "global_batch=16", "microbatch_size=2", "layout.dp=1", "iterations=1"]


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
        assert run.data.metrics == pytest.approx(record["metrics"])
        assert run.data.params["workload"] == record["labels"]["workload"]
        assert run.data.tags["status"] == record["status"]
        names = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
        assert names == ({"config.yaml", "chrome_trace"} if record["status"] == "ok" else {"config.yaml"})
