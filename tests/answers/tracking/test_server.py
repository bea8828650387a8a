"""Runs reach a tracking server on 127.0.0.1, and the pages of the results folder are served."""

import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts

from entrain_bench.answers.tracking.entries import KEY_TAG, PARENT_TAG, SWEEP
from entrain_bench.answers.tracking.log import log_records
from entrain_bench.cli import run_command
from entrain_bench.records.records import Results
from support.servers import STOP_S, free_port, serving

SMALL = ["model=tiny", "cluster=tiny", "global_batch=16", "microbatch_size=2", "layout.dp=1", "iterations=2"]
SWEPT = ["strategy=megatron,entrain", "seed=0,1"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a tracking server of its own."""
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    stores = ["--backend-store-uri", f"sqlite:///{folder}/db", "--artifacts-destination", str(folder / "artifacts")]
    with serving([*command, *stores], port):
        yield f"http://127.0.0.1:{port}"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_sweep_reaches_a_server_whole_and_once(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = [*SMALL, f"results_dir={tmp_path}", f"mlflow_uri={server}", "--multirun", *SWEPT]
    assert run_command(sweep) == 0
    assert run_command(sweep) == 0
    assert not (tmp_path / "mlflow.db").exists()
    client = MlflowClient(tracking_uri=server)
    experiment = client.get_experiment_by_name(" ".join([*SMALL, *SWEPT]))
    assert experiment is not None
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    runs = client.search_runs([experiment.experiment_id])
    keyed = {run.data.tags[KEY_TAG]: run for run in runs}
    parent = keyed.pop(SWEEP)
    page = f"{server}/#/experiments/{experiment.experiment_id}/runs/{parent.info.run_id}/artifacts/answer.html"
    assert capsys.readouterr().err.count(f"answer: {page}") == 1, "the second time nothing is logged"
    records = {record.key: record for record in Results(tmp_path).records()}
    assert keyed.keys() == records.keys()
    assert len(runs) == 5
    assert {artifact.path for artifact in client.list_artifacts(parent.info.run_id)} == {
        *("answer.html", "answer.json", "summary.md", "table.csv", "iteration_time.png", "ranks")
    }
    for key, run in keyed.items():
        assert run.info.status == "FINISHED"
        assert run.data.tags[PARENT_TAG] == parent.info.run_id
        assert run.data.metrics.items() >= dict(records[key].metrics).items()
        assert [each.dataset.name for each in run.inputs.dataset_inputs] == [records[key].labels["workload"]]
        assert run.info.end_time > run.info.start_time
        assert "answer/speedup_over_megatron" in run.data.metrics
        assert len(client.get_metric_history(run.info.run_id, "values_by_iteration/iteration_time_s")) == 2


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_that_was_cut_short_is_logged_anew(server: str, tmp_path: Path) -> None:
    assert run_command([*SMALL, f"results_dir={tmp_path}", "mlflow=false", "--multirun", "seed=3,4"]) == 0
    results, client = Results(tmp_path), MlflowClient(tracking_uri=server)
    records = results.records()
    experiment = client.create_experiment("cut short")
    client.create_run(experiment, tags={KEY_TAG: records[0].key})
    assert log_records(results, records, "cut short", server) == 2
    runs = client.search_runs([experiment])
    assert sorted(run.data.tags[KEY_TAG] for run in runs) == sorted([SWEEP, *(record.key for record in records)])
    assert {run.info.status for run in runs} == {"FINISHED"}


def test_no_server_loses_no_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    uri = f"http://127.0.0.1:{free_port()}"
    assert run_command([*SMALL, f"results_dir={tmp_path}", f"mlflow_uri={uri}", "seed=5"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "MLflow" in line]
    assert len(lines) == 1
    assert f"could not be logged to MLflow ({uri})" in lines[0]
    assert len(Results(tmp_path).records()) == 1


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_pages_of_a_results_folder_are_served_wherever_it_is(tmp_path: Path) -> None:
    before, folder, port = tmp_path / "before", tmp_path / "after", free_port()
    assert run_command([*SMALL, f"results_dir={before}", "--multirun", *SWEPT]) == 0
    before.rename(folder)
    command = [sys.executable, "-m", "entrain_bench.cli", "ui", f"results_dir={folder}", f"port={port}"]
    with serving(command, port) as server:
        assert server.stdout is not None
        name, answer, runs = (server.stdout.readline().strip() for _ in range(3))
        uri = f"http://127.0.0.1:{port}"
        client = MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name(name)
        assert experiment is not None
        assert f"/#/experiments/{experiment.experiment_id}/runs?" in runs
        parent = client.get_run(answer.partition("/runs/")[2].partition("/")[0])
        assert parent.data.metrics["num_ok"] == 4
        file = download_artifacts(
            run_id=parent.info.run_id, artifact_path="summary.md", tracking_uri=uri, dst_path=str(tmp_path)
        )
        assert " over megatron" in Path(file).read_text()
        server.send_signal(signal.SIGTERM)
        assert server.wait(STOP_S) == 0
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "nothing is left behind"
