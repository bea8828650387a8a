"""Logging of records: what MLflow does not show yet is logged, and what the present code no longer makes is marked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from entrain_bench.answers.answer import Pictures
from entrain_bench.answers.tracking.entries import (
    CASE_TAG,
    CONFIGURATION_TAG,
    CURRENT_TAG,
    MAX_DETAILED,
    NOTE_TAG,
    PARENT_TAG,
    SWEEP,
    Entry,
    Logged,
    answer_link,
    entries_of,
    page_tags,
    speedup_name,
)
from entrain_bench.answers.tracking.local import LocalStore
from entrain_bench.answers.tracking.remote import RemoteStore
from entrain_bench.records.environment import current_commit
from entrain_bench.records.records import Record, Results

type Store = LocalStore | RemoteStore

# The experiment of runs that belong to no sweep.
SINGLE_RUNS = "single runs"
# Another process may be creating the store or logging a large sweep.
LOCK_TIMEOUT_S = 600.0


def log_records(
    results: Results,
    records: Sequence[Record],
    name: str,
    uri: str | None = None,
    files: Sequence[Path] = (),
    pictures: Pictures | None = None,
    lost: Sequence[str] = (),
) -> int:
    """Log the records that MLflow does not show as they are now.

    Several go under a parent run, both parent and experiment called ``name``; a single one of that name goes to
    ``SINGLE_RUNS``. Runs of the experiment that are not among the records any more, because code, data or configuration
    changed, are marked by ``CURRENT_TAG``. Without ``uri`` the store is that in the results folder.

    Returns:
        How many runs were logged, the parent left out.

    Raises:
        UserError: for a damaged store.
        MlflowException: for a server that does not answer.
    """
    if not records:
        return 0
    entries = entries_of(results, records, name, files, pictures, lost)
    results.root.mkdir(parents=True, exist_ok=True)
    with FileLock(str(results.root / "mlflow.lock"), timeout=LOCK_TIMEOUT_S):
        store = RemoteStore(uri) if uri else LocalStore(results)
        experiment = store.experiment(name if len(records) > 1 else SINGLE_RUNS)
        logged = store.runs(experiment)
        digests = {entry.key: entry.digest for entry in entries}
        kept = {run.key: run for run in logged if digests.get(run.key) == run.digest}
        store.remove([run.run_id for run in logged if run.key in digests and kept.get(run.key) is not run])
        fresh = [entry for entry in entries if entry.key not in kept]
        if len(records) > 1:
            _add_sweep(store, experiment, entries[0], fresh, kept)
            outdated = [run for run in logged if run.key not in digests]
        else:
            store.add(experiment, fresh, _tags())
            configuration = entries[0].tags[CONFIGURATION_TAG]
            outdated = [run for run in logged if run.key not in digests and run.configuration == configuration]
        _mark(store, [*kept.values()], "yes")
        _mark(store, outdated, "no")
    return sum(entry.key != SWEEP for entry in fresh)


def answer_address(name: str, uri: str) -> str:
    """Address of a logged sweep's answer on a tracking server; empty for a single run, and for other places.

    Raises:
        MlflowException: for a server that does not answer.
    """
    if not uri.startswith(("http://", "https://")):
        return ""
    store = RemoteStore(uri)
    experiment = store.experiment(name)
    sweeps = [run.run_id for run in store.runs(experiment) if run.key == SWEEP]
    return answer_link(uri.rstrip("/"), experiment, sweeps[0]) if sweeps else ""


def _add_sweep(store: Store, experiment: str, parent: Entry, fresh: Sequence[Entry], kept: dict[str, Logged]) -> None:
    """Log the parent if it is fresh, the others below it; those that are kept move to a new parent."""
    if parent in fresh:
        (run_id,) = store.add(experiment, [parent], _tags())
        children = [run.run_id for run in kept.values()]
        store.set_tags(children, {PARENT_TAG: run_id})
    else:
        run_id = kept[SWEEP].run_id
    if fresh:
        # Also where only runs are: the page shows columns that they have.
        speedup = [speedup_name(parent.tags["baseline"])] if "baseline" in parent.tags else []
        by_case = any(CASE_TAG in entry.tags for entry in fresh)
        store.describe(experiment, {**page_tags(speedup, by_case), NOTE_TAG: parent.tags[NOTE_TAG]})
    # Of a large sweep, commits are in the records.
    tags = _tags() if len(fresh) + len(kept) <= MAX_DETAILED else {CURRENT_TAG: "yes"}
    store.add(experiment, [entry for entry in fresh if entry is not parent], {**tags, PARENT_TAG: run_id})


def _mark(store: Store, runs: Sequence[Logged], current: str) -> None:
    store.set_tags([run.run_id for run in runs if run.current != current], {CURRENT_TAG: current})


def _tags() -> dict[str, str]:
    commit = current_commit()
    tags = {
        "git_commit": commit.hash,
        "mlflow.source.git.commit": commit.hash,
        "git_dirty": "yes" if commit.dirty else "no",
    }
    return {CURRENT_TAG: "yes", **(tags if commit.hash else {})}
