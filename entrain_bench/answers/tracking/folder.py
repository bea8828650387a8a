"""MLflow's client of a results folder: a SQLite file, and next to it the artifacts.

Runs name their artifacts relative to the folder that ``entrain-bench ui`` serves, so a results folder can be moved.
MLflow's client knows such names of a server only; here they are files of the folder.
"""

import logging
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from mlflow import MlflowClient
from mlflow.artifacts import list_artifacts
from mlflow.entities import FileInfo
from sqlalchemy import event
from sqlalchemy.engine import URL, Engine

from entrain_bench.answers.tracking import store_path
from entrain_bench.base.errors import UserError
from entrain_bench.records.records import Results

ARTIFACTS = "mlflow-artifacts"
# How long another process may hold the store.
TIMEOUT_S = 60.0


class FolderClient(MlflowClient):
    """MLflow's client of a results folder; ``UserError`` if the store is damaged."""

    def __init__(self, results: Results) -> None:
        path = store_path(results)
        try:
            with closing(sqlite3.connect(path, timeout=TIMEOUT_S)) as store:
                store.execute("SELECT name FROM sqlite_master").fetchall()
        except sqlite3.DatabaseError as error:
            raise UserError(f"{path}: cannot be used ({error}). If it is damaged, delete it") from error
        for noisy in ("alembic", "mlflow.store"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        super().__init__(tracking_uri=store_uri(results))
        self._artifacts = results.root / ARTIFACTS

    def log_artifact(self, run_id: str, local_path: str, artifact_path: str | None = None) -> None:
        """Copy a file to the artifacts of a run, into their folder ``artifact_path``."""
        folder = self._folder(run_id, artifact_path)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(local_path, folder)

    def log_artifacts(self, run_id: str, local_dir: str, artifact_path: str | None = None) -> None:
        """Copy the content of a folder to the artifacts of a run, into their folder ``artifact_path``."""
        shutil.copytree(local_dir, self._folder(run_id, artifact_path), dirs_exist_ok=True)

    def list_artifacts(self, run_id: str, path: str | None = None) -> list[FileInfo]:
        """List the artifacts of a run in their folder ``path``."""
        files: list[FileInfo] = list_artifacts(artifact_uri=self._folder(run_id, path).as_uri())
        return files

    def delete_run(self, run_id: str) -> None:
        """Delete a run and its artifacts."""
        super().delete_run(run_id)
        shutil.rmtree(self._folder(run_id, None), ignore_errors=True)

    def _folder(self, run_id: str, path: str | None) -> Path:
        return self._artifacts.absolute() / run_id / "artifacts" / (path or "")


def store_uri(results: Results) -> str:
    """Return the store of a results folder as MLflow names it."""
    return URL.create("sqlite", database=str(store_path(results).resolve())).render_as_string(hide_password=False)


@event.listens_for(Engine, "connect")
def _skip_syncs(connection: object, _: object) -> None:
    """Leave it to the system when to write to the disk, three times as fast: the store is a view of the records."""
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous = OFF")
