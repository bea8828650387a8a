"""MLflow as a view of the run records: the parent process ingests finished records, workers never touch the store."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from itertools import batched, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import yaml
from filelock import FileLock

from entrain_bench.records.records import LABELS, METRICS, Record, Results, flatten

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPERIMENT = "entrain-bench"
# Compiled where there is a compiled one.
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
KEY_TAG = "entrain_bench.key"
# Another process may be creating the store or logging a large sweep.
LOCK_TIMEOUT_S = 600.0
# MLflow takes up to 100 parameters and, with tags and metrics, 1,000 values in one batch.
MAX_PARAMS, MAX_METRICS = 100, 800


def store_uri(results: Results) -> str:
    """The SQLite store inside the results folder."""
    # Imported here, as MLflow is: it is a quarter of the command's start.
    from sqlalchemy.engine import URL

    path = str((results.root / "mlflow.db").resolve())
    return URL.create("sqlite", database=path).render_as_string(hide_password=False)


def log_records(results: Results, records: Sequence[Record], name: str) -> int:
    """Log the records that MLflow does not have yet; several go under one parent run called ``name``.

    Returns:
        How many runs were logged.
    """
    with FileLock(str(results.root / "mlflow.lock"), timeout=LOCK_TIMEOUT_S):
        client = _client(results)
        experiment = _experiment(client, results)
        known = _known_runs(client, experiment)
        fresh = [record for record in records if known.get(record.key, ("", ""))[1] != record.status]
        if not fresh:
            return 0
        tags: dict[str, str] = {}
        parent = None
        if len(records) > 1:
            parent = client.create_run(experiment, run_name=name).info.run_id
            tags["mlflow.parentRunId"] = parent
        try:
            for record in fresh:
                if record.key in known:
                    client.delete_run(known[record.key][0])
                _log(client, experiment, results, record, tags)
        finally:
            if parent:
                client.set_terminated(parent)
        return len(fresh)


def _client(results: Results) -> MlflowClient:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient

    for noisy in ("alembic", "mlflow.store"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    return MlflowClient(tracking_uri=store_uri(results))


def _experiment(client: MlflowClient, results: Results) -> str:
    found = client.get_experiment_by_name(EXPERIMENT)
    if found:
        return str(found.experiment_id)
    artifacts = (results.root / "mlflow-artifacts").resolve().as_uri()
    return str(client.create_experiment(EXPERIMENT, artifact_location=artifacts))


def _known_runs(client: MlflowClient, experiment: str) -> dict[str, tuple[str, str]]:
    """Run and status of every record that MLflow has, by its key."""
    known: dict[str, tuple[str, str]] = {}
    token = None
    while True:
        page = client.search_runs([experiment], filter_string=f"tags.`{KEY_TAG}` != ''", page_token=token)
        known |= {run.data.tags[KEY_TAG]: (run.info.run_id, run.data.tags.get("status", "")) for run in page}
        token = page.token
        if not token:
            return known


def _log(client: MlflowClient, experiment: str, results: Results, record: Record, tags: dict[str, str]) -> None:
    from mlflow.entities import Metric, Param, RunTag

    labels = record.labels
    name = f"{labels['strategy']} {labels['workload']} {labels['model']} seed {labels['seed']}"
    run = client.create_run(experiment, run_name=name, tags=tags).info.run_id
    now = int(time.time() * 1000)
    params = {**{k: labels[k] for k in LABELS}, **record.settings}
    params |= {f"layout.{name}": text for name, text in record.layout.items()}
    for group in ("strategy", "workload"):
        params |= {f"{group}.{path}": value for path, value in flatten(record.config[group]).items()}
    # The means at step 0 under the table's names, then what each iteration measured.
    metrics = [Metric(k, record.metrics[k], now, 0) for k in METRICS if k in record.metrics]
    metrics += [
        Metric(f"iteration/{name}", value, now, step)
        for step, row in enumerate(record.iterations)
        for name, value in row.items()
    ]
    status = [RunTag(KEY_TAG, record.key), RunTag("status", record.status), RunTag("reason", record.reason[:500])]
    texts = [Param(key, str(value)) for key, value in params.items()]
    for rows, some in zip_longest(batched(metrics, MAX_METRICS), batched(texts, MAX_PARAMS), fillvalue=()):
        client.log_batch(run, metrics=rows, params=some, tags=status)
    with TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(yaml.dump(dict(record.config), Dumper=DUMPER))
        client.log_artifact(run, str(config))
    if results.trace_path(record.key).exists():
        client.log_artifact(run, str(results.trace_path(record.key)), "chrome_trace")
    client.set_terminated(run, "FAILED" if record.status == "failed" else "FINISHED")
