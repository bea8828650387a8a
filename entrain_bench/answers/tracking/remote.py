"""A tracking server elsewhere: every run in few requests, several runs at a time, each request tried again."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from itertools import batched, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from entrain_bench.answers.tracking.entries import DIGEST_TAG, KEY_TAG, Entry, Logged, content_of, page_tags

if TYPE_CHECKING:
    from mlflow import MlflowClient

# Runs that are logged at a time: a request mostly waits.
NUM_THREADS = 8
# MLflow takes up to 100 parameters and, with tags and metrics, 1,000 values in one batch.
MAX_PARAMS = 100
MAX_METRICS = 800
# MLflow's own are 7 tries and 120 s, four minutes for a server that is not there; and two lines of output for each run.
SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "4",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


class RemoteStore:
    """A tracking server as a place for runs."""

    def __init__(self, uri: str) -> None:
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        # Every try that failed is a warning; what matters is said in the end.
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
        self._client: MlflowClient = MlflowClient(tracking_uri=uri)

    def experiment(self, name: str) -> str:
        """Identifier of an experiment, made if it is not there."""
        found = self._client.get_experiment_by_name(name)
        if found is None:
            return str(self._client.create_experiment(name, tags=page_tags()))
        if found.lifecycle_stage == "deleted":
            self._client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)

    def runs(self, experiment: str) -> list[Logged]:
        """The runs that an experiment has."""
        found: list[Logged] = []
        token = None
        while True:
            page = self._client.search_runs([experiment], filter_string=f"tags.`{KEY_TAG}` != ''", page_token=token)
            found += [Logged.of(run.info.run_id, run.data.tags) for run in page]
            token = page.token
            if not token:
                return found

    def add(self, experiment: str, entries: Sequence[Entry], tags: Mapping[str, str]) -> list[str]:
        """Log runs with further tags; returns their identifiers."""
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            runs = [pool.submit(self._add, experiment, entry, tags) for entry in entries]
            try:
                return [run.result() for run in runs]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def remove(self, run_ids: Sequence[str]) -> None:
        """Take runs away."""
        for run_id in run_ids:
            self._client.delete_run(run_id)

    def set_tags(self, run_ids: Sequence[str], tags: Mapping[str, str]) -> None:
        """Set tags of runs."""
        from mlflow.entities import RunTag

        for run_id in run_ids:
            self._client.log_batch(run_id, tags=[RunTag(*item) for item in tags.items()])

    def describe(self, experiment: str, tags: Mapping[str, str]) -> None:
        """Set tags of an experiment."""
        for name, text in tags.items():
            self._client.set_experiment_tag(experiment, name, text)

    def _add(self, experiment: str, entry: Entry, tags: Mapping[str, str]) -> str:
        """Log one run; its digest comes last, so that one which was cut short is known by its lack."""
        from mlflow.entities import Dataset, DatasetInput, Metric, Param, RunTag

        own = {**entry.tags, **tags, KEY_TAG: entry.key}
        run = self._client.create_run(experiment, entry.started_ms, own, entry.name)
        run_id = str(run.info.run_id)
        now_ms = int(run.info.start_time)
        self._log_artifacts(run_id, entry)
        if entry.dataset:
            self._client.log_inputs(run_id, [DatasetInput(Dataset(*astuple(entry.dataset)))])
        self._client.set_terminated(run_id, "FAILED" if entry.failed else "FINISHED", now_ms + entry.duration_ms)
        metrics = [Metric(name, value, now_ms, 0) for name, value in entry.metrics.items()]
        metrics += [Metric(name, value, now_ms, step) for step, name, value in entry.steps]
        params = [Param(*item) for item in entry.params.items()]
        batches = [*zip_longest(batched(metrics, MAX_METRICS), batched(params, MAX_PARAMS), fillvalue=())]
        for some, texts in batches[:-1]:
            self._client.log_batch(run_id, metrics=some, params=texts)
        some, texts = batches[-1] if batches else ((), ())
        self._client.log_batch(run_id, metrics=some, params=texts, tags=[RunTag(DIGEST_TAG, entry.digest)])
        return run_id

    def _log_artifacts(self, run_id: str, entry: Entry) -> None:
        with TemporaryDirectory() as folder:
            for path, content in entry.artifacts.items():
                file = Path(folder) / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content_of(content))
            if entry.artifacts:
                self._client.log_artifacts(run_id, folder)
