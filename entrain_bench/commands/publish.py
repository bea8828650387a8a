"""Last steps of a command that ran cells: write tables of all records, print some of them, log to MLflow."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.commands import command_line, results_word
from entrain_bench.answers.console_table import print_table
from entrain_bench.answers.text import count
from entrain_bench.answers.tracking import store_path
from entrain_bench.answers.tracking.log import log_records, tracking_uri
from entrain_bench.base.errors import TRACEBACK_VARIABLE, UserError, explain
from entrain_bench.commands.watch import say
from entrain_bench.records import tables
from entrain_bench.records.code import metrics_version
from entrain_bench.records.metrics import DEVICE_TYPE
from entrain_bench.records.records import PlannedSweep, Record, Results

# A server's answer may be a page.
MAX_REASON = 300


def publish(
    results: Results,
    planned: Mapping[str, str],
    name: str,
    mlflow: bool,
    mlflow_uri: str | None,
    unbegun: Sequence[str] = (),
    columns: Sequence[str] = (),
) -> list[Record]:
    """Write the tables of all records, print those of some runs and log them under a name; returns them.

    ``planned`` has the overrides of every run that was to leave a record, by its key; ``unbegun`` those of runs that
    the sweep did not come to. A sweep writes both (``PlannedSweep``). Without a URI the store is in the folder.
    ``columns`` are further metrics of the table.
    """
    sweep = PlannedSweep(name, planned, unbegun)
    if len(planned) + len(unbegun) > 1:
        sweep.write(results)
    write_tables(results)
    # Only now: memory holds those of the tables, or these.
    records = [record for key in planned if (record := results.read(key))]
    lost = sweep.lost(results)
    tables_of = separately(records)
    for index, group in enumerate(tables_of):
        print_table(group, lost if index + 1 == len(tables_of) else (), columns)
    if len(tables_of) > 1:
        say("ranks computed on a CPU, which checks training: iteration times do not rank strategies")
    if mlflow:
        log_to_mlflow(results, records, name, mlflow_uri, lost=lost)
    return records


def separately(records: Sequence[Record]) -> list[list[Record]]:
    """The records of each table: of each strategy for its own if ranks trained on a CPU, whose times rank nothing."""
    if not any(record.execution.get(DEVICE_TYPE) == "cpu" for record in records):
        return [[*records]]
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(str(record.config["strategy"]), []).append(record)
    return [*groups.values()]


def say_outdated(records: Sequence[Record]) -> None:
    """Say how many runs have metrics of older code."""
    if older := sum(record.status == "ok" and record.metrics_version != metrics_version() for record in records):
        say(f"{older} of {len(records)} runs have metrics of older code. To compute them, use another results_dir")


def write_tables(results: Results) -> None:
    """Write the tables of all records; report errors of writing, but do not fail, because records have all data."""
    try:
        tables.write_tables(results)
    except OSError as error:
        say(f"entrain-bench: {results.root}: tables cannot be written ({error})")


def log_to_mlflow(
    results: Results,
    records: Sequence[Record],
    name: str,
    uri: str | None = None,
    files: Sequence[Path] = (),
    lost: Sequence[str] = (),
) -> bool:
    """Log records that MLflow does not have; returns whether nothing went wrong.

    Errors are printed and not raised, for MLflow is a view of the records.
    """
    uri = tracking_uri(uri)
    parts = urlsplit(uri)
    # A server's address without a password.
    place = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl() if uri else str(store_path(results))
    try:
        num_logged, address = log_records(results, records, name, uri, files, draw_standings, lost)
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            traceback.print_exception(error)
        reason = str(error) if isinstance(error, UserError) or uri else explain(error)
        reason = " ".join((reason.replace(uri, place) if uri else reason).split())
        shown = reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]}..."
        say(f"entrain-bench: runs are recorded, but could not be logged to MLflow ({place}): {shown}")
        return False
    if num_logged:
        show = command_line(["ui", *results_word(str(results.root))])
        say(f"logged {count(num_logged, 'run')} to {place}" + ("" if uri else f" ({show} links to the answer)"))
    if address:
        # Without a password.
        say(f"answer: {address.replace(uri.rstrip('/'), place.rstrip('/'))}")
    return True


def draw_standings(answer: Answer) -> bytes:
    """Return a picture of the iteration times of an answer (PNG)."""
    from entrain_bench.figures._plot import standings_png

    return standings_png(answer)
