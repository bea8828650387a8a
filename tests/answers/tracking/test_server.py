"""Runs reach a tracking server on 127.0.0.1, and the pages of the results folder are served."""

import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts

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
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = [*SMALL, f"results_dir={tmp_path}", "--multirun", *SWEPT]
    assert run_command([*sweep, f"mlflow_uri={server}"]) == 0
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    assert run_command(sweep) == 0
    assert not (tmp_path / "mlflow.db").exists()
    client = MlflowClient(tracking_uri=server)
    experiment = client.get_experiment_by_name(" ".join([*SMALL, *SWEPT]))
    assert experiment is not None
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    parent = runs.pop(experiment.name)
    assert {*runs} == {"megatron", "entrain"}
    page = f"{server}/#/experiments/{experiment.experiment_id}/runs/{parent.info.run_id}/artifacts/answer.html"
    assert capsys.readouterr().err.count(f"answer: {page}") == 1, "the second time nothing is logged"
    artifacts = {artifact.path for artifact in client.list_artifacts(parent.info.run_id)}
    assert artifacts == {"answer.html", "answer.md", "answer.json", "table.json", "iteration_time.png"}
    table = client.load_table(experiment.experiment_id, "table.json", [parent.info.run_id])
    assert {*table["key"]} == {record.key for record in Results(tmp_path).records()}
    for run in runs.values():
        assert run.info.status == "FINISHED"
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert "speedup_over_megatron" in run.data.metrics


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
            run_id=parent.info.run_id, artifact_path="answer.md", tracking_uri=uri, dst_path=str(tmp_path)
        )
        assert " over megatron" in Path(file).read_text()
        server.send_signal(signal.SIGTERM)
        assert server.wait(STOP_S) == 0
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "nothing is left behind"
