"""The MLflow store in the results folder, a SQLite file; hundreds of runs are written in one transaction.

MLflow makes the file, once for all folders. Experiments and runs are written directly, as rows of seven tables. Through
``MlflowClient`` (3.17.2, ``log_batch``, the same file) that takes 42 times as long: 4.22 CPU s for 100 runs and not
0.10 s, and 2.8 CPU s for an experiment in a new folder (two cores, 2026-11). Artifacts are named
relative to the folder that the server is told, so that a results folder can be moved.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import shutil
import sqlite3
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from importlib.metadata import version
from itertools import batched
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from entrain_bench.answers.tracking.entries import (
    DIGEST_TAG,
    KEY_TAG,
    LOGGED_TAGS,
    SWEEP,
    Entry,
    Logged,
    content_of,
    page_tags,
)
from entrain_bench.base.errors import UserError
from entrain_bench.base.files import write_atomically
from entrain_bench.base.store import cache_folder
from entrain_bench.records.records import Results

_TEXT = "run_uuid, key, value"
_NUMBER = "run_uuid, key, value, is_nan, timestamp, step"
_RUN = (
    "run_uuid, name, status, start_time, end_time, artifact_uri, experiment_id, lifecycle_stage, source_type, user_id"
)
# Columns of a run's rows, its own before those that refer to it. MLflow keeps every number twice: all, and the last of
# each name.
TABLES = {"runs": _RUN, "tags": _TEXT, "params": _TEXT, "metrics": _NUMBER, "latest_metrics": _NUMBER}
# A dataset is known by its experiment, name and digest; an input links it to a run.
ADD_DATASET = (
    "INSERT OR IGNORE INTO datasets"
    " (dataset_uuid, experiment_id, name, digest, dataset_source_type, dataset_source) VALUES (?, ?, ?, ?, ?, ?)"
)
ADD_INPUT = (
    "INSERT INTO inputs (input_uuid, source_type, source_id, destination_type, destination_id)"
    " SELECT ?, 'DATASET', dataset_uuid, 'RUN', ? FROM datasets WHERE experiment_id = ? AND name = ? AND digest = ?"
)
REMOVE_INPUT = "DELETE FROM inputs WHERE destination_type = 'RUN' AND destination_id = ?"
SET_UPDATED = "UPDATE experiments SET last_update_time = ? WHERE experiment_id = ?"
SET_TAG = "INSERT OR REPLACE INTO tags (run_uuid, key, value) VALUES (?, ?, ?)"
SET_EXPERIMENT_TAG = "INSERT OR REPLACE INTO experiment_tags (experiment_id, key, value) VALUES (?, ?, ?)"
EXPERIMENT = "SELECT experiment_id FROM experiments WHERE name = ?"
RESTORE_EXPERIMENT = "UPDATE experiments SET lifecycle_stage = 'active' WHERE name = ? AND lifecycle_stage = 'deleted'"
INSERT_EXPERIMENT = (
    "INSERT INTO experiments (name, artifact_location, lifecycle_stage, creation_time, last_update_time)"
    " VALUES (?, ?, 'active', ?, ?)"
)
# Experiments with runs, the last logged first, each with the run whose tag has a value.
EXPERIMENTS = """
    SELECT e.experiment_id, e.name, MAX(CASE WHEN t.value = ? THEN r.run_uuid ELSE '' END)
    FROM experiments e
    JOIN runs r ON r.experiment_id = e.experiment_id AND r.lifecycle_stage = 'active'
    LEFT JOIN tags t ON t.run_uuid = r.run_uuid AND t.key = ?
    WHERE e.lifecycle_stage = 'active'
    GROUP BY e.experiment_id, e.name
    ORDER BY e.last_update_time DESC, e.experiment_id DESC
"""
# Runs of an experiment with four of their tags.
RUNS = """
    SELECT r.run_uuid, t.key, t.value
    FROM runs r
    JOIN tags t ON t.run_uuid = r.run_uuid AND t.key IN (?, ?, ?, ?)
    WHERE r.experiment_id = ? AND r.lifecycle_stage = 'active'
"""
# How long another process may hold the file.
TIMEOUT_S = 60.0
# Where a run's artifacts are, in its own words and in the results folder.
ARTIFACT_SCHEME = "mlflow-artifacts:/"
ARTIFACTS = "mlflow-artifacts"
# Runs of one transaction.
MAX_RUNS = 500


def store_path(results: Results) -> Path:
    """The SQLite file."""
    return results.root / "mlflow.db"


def store_uri(results: Results) -> str:
    """The store as MLflow names it."""
    return _uri_of(store_path(results))


def _uri_of(path: Path) -> str:
    # Imported here, as MLflow is: it is a quarter of the command's start.
    from sqlalchemy.engine import URL

    return URL.create("sqlite", database=str(path.resolve())).render_as_string(hide_password=False)


class LocalStore:
    """The place for runs in a results folder.

    Raises:
        UserError: from every method, for a file that is not MLflow's.
    """

    def __init__(self, results: Results) -> None:
        self._results = results
        self._path = store_path(results)

    def experiment(self, name: str) -> str:
        """Identifier of an experiment, made if it is not there."""
        if not self._path.exists():
            write_atomically(self._path, _empty_store())
        now_ms = int(time.time() * 1000)
        with self._connection() as database:
            database.execute(RESTORE_EXPERIMENT, (name,))
            if database.execute(EXPERIMENT, (name,)).fetchone() is None:
                database.execute(INSERT_EXPERIMENT, (name, ARTIFACT_SCHEME, now_ms, now_ms))
                (made,) = database.execute(EXPERIMENT, (name,)).fetchone()
                tags = [(made, *item) for item in page_tags().items()]
                database.executemany(SET_EXPERIMENT_TAG, tags)
            (found,) = database.execute(EXPERIMENT, (name,)).fetchone()
        return str(found)

    def experiments(self) -> list[tuple[str, str, str]]:
        """Identifier and name of every experiment with runs, and the run of its sweep if it has one, newest first."""
        if not self._path.exists():
            return []
        with self._connection() as database:
            return [(str(one), *named) for one, *named in database.execute(EXPERIMENTS, (SWEEP, KEY_TAG))]

    def runs(self, experiment: str) -> list[Logged]:
        """The runs that an experiment has."""
        tags: dict[str, dict[str, str]] = {}
        with self._connection() as database:
            for run_id, name, text in database.execute(RUNS, (*LOGGED_TAGS, int(experiment))):
                tags.setdefault(run_id, {})[name] = text
        return [Logged.of(run_id, own) for run_id, own in tags.items() if own.get(KEY_TAG)]

    def add(self, experiment: str, entries: Sequence[Entry], tags: Mapping[str, str]) -> list[str]:
        """Log runs with further tags; returns their identifiers."""
        # The same for as long as a run is called the same, so that links to it stay good. Half of MLflow's usual
        # length, for every row of the store repeats it up to four times.
        run_ids = [hashlib.sha256(f"{experiment} {entry.key}".encode()).hexdigest()[:16] for entry in entries]
        # One that was deleted on the page is still in the file.
        self.remove(run_ids)
        for some in batched(zip(run_ids, entries, strict=True), MAX_RUNS):
            for run_id, entry in some:
                folder = self._results.root / ARTIFACTS / run_id / "artifacts"
                for path, content in entry.artifacts.items():
                    if isinstance(content, Path):
                        _link(content, folder / path)
                    else:
                        write_atomically(folder / path, content_of(content))
            rows: dict[str, list[Sequence[Any]]] = {table: [] for table in TABLES}
            for run_id, entry in some:
                _add_rows(rows, run_id, int(experiment), entry, tags)
            with self._connection() as database:
                for table, columns in TABLES.items():
                    places = ", ".join("?" for _ in columns.split(","))
                    database.executemany(f"INSERT INTO {table} ({columns}) VALUES ({places})", rows[table])  # noqa: S608
                _add_datasets(database, int(experiment), some)
                database.execute(SET_UPDATED, (int(time.time() * 1000), int(experiment)))
        return run_ids

    def remove(self, run_ids: Sequence[str]) -> None:
        """Take runs away."""
        with self._connection() as database:
            rows = [(run_id,) for run_id in run_ids]
            database.executemany(REMOVE_INPUT, rows)
            for table in reversed(TABLES):
                database.executemany(f"DELETE FROM {table} WHERE run_uuid = ?", rows)  # noqa: S608
        for run_id in run_ids:
            shutil.rmtree(self._results.root / ARTIFACTS / run_id, ignore_errors=True)

    def set_tags(self, run_ids: Sequence[str], tags: Mapping[str, str]) -> None:
        """Set tags of runs."""
        rows = [(run_id, name, text) for run_id in run_ids for name, text in tags.items()]
        with self._connection() as database:
            database.executemany(SET_TAG, rows)

    def describe(self, experiment: str, tags: Mapping[str, str]) -> None:
        """Set tags of an experiment."""
        rows = [(int(experiment), *item) for item in tags.items()]
        with self._connection() as database:
            database.executemany(SET_EXPERIMENT_TAG, rows)

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self._path, timeout=TIMEOUT_S)) as database, database:
                yield database
        except sqlite3.DatabaseError as error:
            advice = "if it is damaged, delete it (runs are logged anew)"
            raise UserError(f"{self._path}: cannot be used ({error}); {advice}") from error


def _empty_store() -> bytes:
    """A store without runs, as MLflow makes it; kept for later folders, for that takes MLflow seconds."""
    kept = cache_folder() / f"mlflow-{version('mlflow')}.db"
    with (
        suppress(OSError, sqlite3.DatabaseError),
        closing(sqlite3.connect(f"{kept.as_uri()}?mode=ro", uri=True)) as one,
    ):
        if one.execute("PRAGMA quick_check").fetchone() == ("ok",):
            return kept.read_bytes()
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient

    for noisy in ("alembic", "mlflow.store"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "mlflow.db"
        MlflowClient(tracking_uri=_uri_of(path)).search_experiments()
        with closing(sqlite3.connect(path)) as database:
            # Of the one that every store has: it would name the folder from which it was made.
            with database:
                database.execute("UPDATE experiments SET artifact_location = ?", (ARTIFACT_SCHEME,))
            content = database.serialize()
    with suppress(OSError):
        write_atomically(kept, content)
    return content


def _link(source: Path, target: Path) -> None:
    """The same file under another name; a copy where there are no links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def _add_datasets(database: sqlite3.Connection, experiment: int, logged: Sequence[tuple[str, Entry]]) -> None:
    """Add the datasets of runs that are there, each once, and link the runs to them."""
    for run_id, entry in logged:
        if data := entry.dataset:
            named = experiment, data.name, data.digest
            database.execute(ADD_DATASET, (_uuid(*named), *named, data.source_type, data.source))
            database.execute(ADD_INPUT, (_uuid(run_id, *named), run_id, *named))


def _uuid(*parts: object) -> str:
    """An identifier that follows from what it is of."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _add_rows(
    rows: Mapping[str, list[Sequence[Any]]],
    run_id: str,
    experiment: int,
    entry: Entry,
    tags: Mapping[str, str],
) -> None:
    started_ms = int(time.time() * 1000) if entry.started_ms is None else entry.started_ms
    ended_ms = started_ms + entry.duration_ms
    status = "FAILED" if entry.failed else "FINISHED"
    artifacts = f"{ARTIFACT_SCHEME}{run_id}/artifacts"
    times = started_ms, ended_ms
    rows["runs"].append((run_id, entry.name, status, *times, artifacts, experiment, "active", "LOCAL", ""))
    own = {**entry.tags, **tags, "mlflow.runName": entry.name, KEY_TAG: entry.key, DIGEST_TAG: entry.digest}
    rows["tags"] += [(run_id, *item) for item in own.items()]
    rows["params"] += [(run_id, *item) for item in entry.params.items()]
    steps = [(name, value, 0) for name, value in entry.metrics.items()]
    steps += [(name, value, step) for step, name, value in entry.steps]
    found = [(run_id, name, *_storable(value), ended_ms, step) for name, value, step in steps]
    rows["metrics"] += found
    rows["latest_metrics"] += {row[1]: row for row in found}.values()


def _storable(value: float) -> tuple[float, bool]:
    """A number as MLflow stores it, and whether it is not one."""
    if math.isnan(value):
        return 0.0, True
    return max(-sys.float_info.max, min(sys.float_info.max, float(value))), False
