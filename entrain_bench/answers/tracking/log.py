"""MLflow as a view of the records: its client logs ``entries`` to a server or to the folder of results."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from filelock import FileLock

from entrain_bench.answers.tracking import store_path
from entrain_bench.answers.tracking.entries import ANSWER_PAGE, NOTE_TAG, DrawStandings, Entry, digest_of, entries_of
from entrain_bench.records.records import Record, Results

if TYPE_CHECKING:
    from mlflow import MlflowClient

# Pages are readable with shorter names of sweeps.
MAX_SHOWN = 160
# The server to log to if no key names one; MLflow's own variable.
URI_VARIABLE = "MLFLOW_TRACKING_URI"
# Overrides that do not concern swept keys.
ASIDE = ("results_dir=", "mlflow", "retry=", "columns=", "hydra")
# Other pages are made for generative models.
WORKFLOW = {"workflowType": "machine_learning"}
# The experiment of runs that belong to no sweep.
SINGLE_RUNS = "single runs"
# Tags of a run: its identity, a hash of the content of it and the runs below, its parent.
ID_TAG = "entrain_bench.case"
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


def tracking_uri(given: str | None) -> str:
    """Return the address of the tracking server; empty for the store in the folder of results."""
    return given or os.environ.get(URI_VARIABLE, "")


def sweep_name(overrides: Sequence[str]) -> str:
    """Return the name of a sweep: its figure, or its overrides, or ``defaults`` without any."""
    texts = [text for text in overrides if not text.lstrip("+").startswith(ASIDE)]
    name = texts[0].removeprefix("figure=") if len(texts) == 1 else " ".join(texts)
    # A hash keeps different names different.
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return (name if len(name) <= MAX_SHOWN else f"{name[:MAX_SHOWN]}... {digest}") or "defaults"


def page_link(base: str, *path: str) -> str:
    """Return the address of a page of experiments on a server, whose root shows MLflow's pages for GenAI."""
    return f"{base}/#/{'/'.join(['experiments', *path])}?{urlencode(WORKFLOW)}"


def log_records(
    results: Results,
    records: Sequence[Record],
    name: str,
    uri: str = "",
    files: Sequence[Path] = (),
    draw: DrawStandings | None = None,
    lost: Sequence[str] = (),
) -> tuple[int, str]:
    """Log the records whose current state MLflow does not show, to a server or without ``uri`` to the folder.

    Several go under a parent run, both parent and experiment called ``name``; a single one goes to ``SINGLE_RUNS``. If
    anything changed, they are replaced. Returns the number of runs that were logged, without the parent, and the
    address of the answer on a server, if any.
    ``UserError`` for a damaged store, ``MlflowException`` for a server that does not answer.
    """
    if not records:
        return 0, ""
    entries = entries_of(results, records, name, files, draw, lost)
    results.root.mkdir(parents=True, exist_ok=True)
    # A file has one writer at a time.
    with (
        FileLock(str(results.root / "mlflow.lock"), timeout=LOCK_TIMEOUT_S),
        ThreadPoolExecutor(NUM_THREADS if uri else 1) as pool,
    ):
        client = open_client(results, uri)
        experiment = experiment_id(client, name if len(records) > 1 else SINGLE_RUNS, uri)
        num_runs, sweep = _log_all(client, experiment, entries, pool)
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
        lines += [one.name, *answer, f"  runs:   {page_link(base, one.experiment_id, 'runs')}"]
    return [*lines, f"all experiments: {page_link(base)}"] if lines else []


def _answer_link(base: str, experiment: str, run_id: str) -> str:
    return page_link(base, experiment, "runs", run_id, "artifacts", ANSWER_PAGE)


def experiment_id(client: MlflowClient, name: str, uri: str) -> str:
    """Return the experiment of a name, which is created or restored if it is not there."""
    known = client.get_experiment_by_name(name)
    if known is None:
        return str(client.create_experiment(name, None if uri else "mlflow-artifacts:/"))
    if known.lifecycle_stage == "deleted":
        client.restore_experiment(known.experiment_id)
    return str(known.experiment_id)


def _log_all(
    client: MlflowClient, experiment: str, entries: Sequence[Entry], pool: ThreadPoolExecutor
) -> tuple[int, str]:
    """Log entries unless all are there unchanged; returns how many, without the parent, and the parent's run if any.

    They replace those of the same sweep, or of the same single run. The digest is tagged last: without it, a run was
    interrupted.
    """
    first, *cases = entries
    digest = digest_of([entry.digest for entry in entries])
    wanted = f"tags.`{ID_TAG}` != ''" if cases else f"tags.`{ID_TAG}` = '{first.case}'"
    known = client.search_runs([experiment], wanted, max_results=MAX_RUNS)
    complete = next((run.info.run_id for run in known if run.data.tags.get(DIGEST_TAG) == digest), "")
    for run in known:
        if not complete or complete not in (run.info.run_id, run.data.tags.get(PARENT_TAG)):
            client.delete_run(run.info.run_id)
    if complete:
        return 0, ""
    run_id = log_entry(client, experiment, first, {})
    [*pool.map(lambda entry: log_entry(client, experiment, entry, {PARENT_TAG: run_id}), cases)]
    client.set_tag(run_id, DIGEST_TAG, digest)
    page = {LOGGED_TAG: str(time.time_ns() // 10**6)}
    if cases:
        page |= {NOTE_TAG: first.tags.get(NOTE_TAG, ""), SWEEP_TAG: run_id}
    for name, text in page.items():
        client.set_experiment_tag(experiment, name, text)
    return len(cases) or 1, run_id if cases else ""


def log_entry(client: MlflowClient, experiment: str, entry: Entry, tags: Mapping[str, str]) -> str:
    """Log one run with further tags; it counts as running until all is there."""
    from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param

    started_ms, ended_ms = entry.made_ms or [time.time_ns() // 10**6] * 2
    run = client.create_run(experiment, started_ms, {**entry.tags, **tags, ID_TAG: entry.case}, entry.name)
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
