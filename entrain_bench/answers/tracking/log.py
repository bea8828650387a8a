"""Log records by MLflow's client, to a server or to the folder of results."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from filelock import FileLock

from entrain_bench.answers.answer import Pictures
from entrain_bench.answers.tracking.entries import (
    ANSWER_PAGE,
    BASELINE_TAG,
    CASE_TAG,
    CURRENT_TAG,
    NOTE_TAG,
    SWEEP,
    VIEW,
    Entry,
    entries_of,
    page_link,
    page_tags,
    store_path,
)
from entrain_bench.records.records import Record, Results

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

# The experiment of runs that belong to no sweep.
SINGLE_RUNS = "single runs"
# Tags of a run: what it is known by, a hash of all that it shows, and its parent.
ID_TAG = "entrain_bench.case"
CODE_TAG = "code_version"
DIGEST_TAG = "entrain_bench.digest"
PARENT_TAG = "mlflow.parentRunId"
# Tags of an experiment: when it was logged to last, and its parent run.
LOGGED_TAG = "entrain_bench.logged_ms"
SWEEP_TAG = "entrain_bench.sweep"
# Another process may be creating the store or logging a large sweep.
LOCK_TIMEOUT_S = 600.0
# Runs that MLflow returns at once at most.
MAX_RUNS = 50_000
# Runs that are logged to a server at a time: a request mostly waits.
NUM_THREADS = 8
# MLflow's own are 7 tries and 120 s, four minutes for a server that is not there; and two lines of output for each run.
SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "4",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


def log_records(
    results: Results,
    records: Sequence[Record],
    name: str,
    uri: str = "",
    files: Sequence[Path] = (),
    pictures: Pictures | None = None,
    lost: Sequence[str] = (),
) -> tuple[int, str]:
    """Log the records that MLflow does not show as they are now, to a server or without ``uri`` to the folder.

    Several go under a parent run, both parent and experiment called ``name``; a single one goes to ``SINGLE_RUNS``. A
    run whose content changed is replaced. Runs that are not among the records any more are marked by ``CURRENT_TAG``.

    Returns:
        The number of runs that were logged, without the parent, and the address of the answer on a server, if any.

    Raises:
        UserError: for a damaged store.
        MlflowException: for a server that does not answer.
    """
    if not records:
        return 0, ""
    entries = entries_of(results, records, name, files, pictures, lost)
    results.root.mkdir(parents=True, exist_ok=True)
    with FileLock(str(results.root / "mlflow.lock"), timeout=LOCK_TIMEOUT_S):
        client = open_client(results, uri)
        experiment = _experiment(client, name if len(records) > 1 else SINGLE_RUNS, uri)
        # A file has one writer at a time.
        with ThreadPoolExecutor(NUM_THREADS if uri else 1) as pool:
            try:
                num_runs, sweep = _log_all(client, experiment, entries, pool)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    return num_runs, _answer_link(uri.rstrip("/"), experiment, sweep) if uri and sweep and num_runs else ""


def open_client(results: Results, uri: str) -> MlflowClient:
    """Return MLflow's client of a server, or of the folder of results; ``UserError`` for a damaged store."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    # Imported here, for it takes a second.
    if not uri:
        from entrain_bench.answers.tracking.folder import FolderClient

        return FolderClient(results)
    from mlflow import MlflowClient

    # Every try that failed is a warning; the command says once that all have failed.
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
    return MlflowClient(tracking_uri=uri)


def links(results: Results, base: str, most: int) -> list[str]:
    """Return lines with the pages of the last experiments (answer of a sweep, runs) and of all; none without runs."""
    if not store_path(results).exists():
        return []
    logged = [one for one in open_client(results, "").search_experiments() if LOGGED_TAG in one.tags]
    lines = list[str]()
    for one in sorted(logged, key=lambda one: int(one.tags[LOGGED_TAG]), reverse=True)[:most]:
        sweep = one.tags.get(SWEEP_TAG)
        answer = [f"  answer: {_answer_link(base, one.experiment_id, sweep)}"] if sweep else []
        lines += [one.name, *answer, f"  runs:   {page_link(base, one.experiment_id, 'runs', viewStateShareKey=VIEW)}"]
    return [*lines, f"all experiments: {page_link(base)}"] if lines else []


def _answer_link(base: str, experiment: str, run_id: str) -> str:
    return page_link(base, experiment, "runs", run_id, "artifacts", ANSWER_PAGE)


def _experiment(client: MlflowClient, name: str, uri: str) -> str:
    known = client.get_experiment_by_name(name)
    if known is None:
        return str(client.create_experiment(name, None if uri else "mlflow-artifacts:/", page_tags()))
    if known.lifecycle_stage == "deleted":
        client.restore_experiment(known.experiment_id)
    return str(known.experiment_id)


def _log_all(
    client: MlflowClient, experiment: str, entries: Sequence[Entry], pool: ThreadPoolExecutor
) -> tuple[int, str]:
    """Log the entries that are not there; returns how many, without the parent, and the parent's run if any."""
    digests = {entry.key: entry.digest for entry in entries}
    kept: dict[tuple[str, str], Run] = {}
    outdated: list[Run] = []
    for run in client.search_runs([experiment], f"tags.`{ID_TAG}` != ''", max_results=MAX_RUNS):
        key = run.data.tags[ID_TAG], run.data.tags.get(CODE_TAG, "")
        if key not in digests:
            outdated += [run] if entries[0].case in (SWEEP, key[0]) else []
        # One that is still running was interrupted; restored experiments have runs twice.
        elif key in kept or run.data.tags.get(DIGEST_TAG) != digests[key] or run.info.status == "RUNNING":
            client.delete_run(run.info.run_id)
        else:
            kept[key] = run
    parent = entries[0] if entries[0].case == SWEEP else None
    cases = entries[1:] if parent else entries
    sweep = ""
    tags: dict[str, str] = {}
    if parent:
        known = kept.pop(parent.key, None)
        sweep = known.info.run_id if known else log_entry(client, experiment, parent, {})
        tags = {PARENT_TAG: sweep}
    fresh = [entry for entry in cases if entry.key not in kept]
    [*pool.map(lambda entry: log_entry(client, experiment, entry, tags), fresh)]
    marks = [(run, {**tags, CURRENT_TAG: "yes"}) for run in kept.values()]
    marks += [(run, {CURRENT_TAG: "no"}) for run in outdated]
    changed = [(run, *mark) for run, texts in marks for mark in texts.items() - run.data.tags.items()]
    [*pool.map(lambda change: client.set_tag(change[0].info.run_id, *change[1:]), changed)]
    if fresh or (parent and not known):
        page = {LOGGED_TAG: str(time.time_ns() // 10**6)}
        if parent:
            page |= page_tags(parent.tags.get(BASELINE_TAG, ""), any(CASE_TAG in entry.tags for entry in cases))
            page |= {NOTE_TAG: parent.tags[NOTE_TAG], SWEEP_TAG: sweep}
        for name, text in page.items():
            client.set_experiment_tag(experiment, name, text)
    return len(fresh), sweep


def log_entry(client: MlflowClient, experiment: str, entry: Entry, tags: Mapping[str, str]) -> str:
    """Log one run with further tags; it counts as running until all is there."""
    from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param

    known_by = {ID_TAG: entry.case, CODE_TAG: entry.code_version, DIGEST_TAG: entry.digest, CURRENT_TAG: "yes"}
    started_ms, ended_ms = entry.made_ms or [time.time_ns() // 10**6] * 2
    run = client.create_run(experiment, started_ms, {**entry.tags, **tags, **known_by}, entry.name)
    run_id = str(run.info.run_id)
    if entry.artifacts:
        with TemporaryDirectory() as folder:
            for path, content in entry.artifacts.items():
                file = Path(folder) / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content())
            client.log_artifacts(run_id, folder)
    if entry.table:
        client.log_table(run_id, entry.table(), "table.json")
    if entry.dataset:
        name, digest, source = entry.dataset
        context = InputTag("mlflow.data.context", "training")
        client.log_inputs(run_id, [DatasetInput(Dataset(name, digest, "code", source), [context])])
    client.log_batch(
        run_id,
        metrics=[
            Metric(name, value, ended_ms, step)
            for name, steps in entry.metrics.items()
            for step, value in steps.items()
        ],
        params=[Param(name, str(value)) for name, value in entry.params.items()],
    )
    client.set_terminated(run_id, "FAILED" if entry.failed else "FINISHED", ended_ms)
    return run_id
