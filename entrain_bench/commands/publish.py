"""What stands at the end of a command that ran cells: the tables of all records, what is shown of some, and MLflow."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence

from entrain_bench.commands.watch import say
from entrain_bench.errors import TRACEBACK_VARIABLE, explain
from entrain_bench.records.records import Record, Results
from entrain_bench.records.report import print_table
from entrain_bench.records.tracking import log_records


def publish(results: Results, records: Sequence[Record], name: str, mlflow: bool) -> None:
    """Write the tables of all records, print these and log them under a name."""
    results.write_tables()
    print_table(records)
    if mlflow:
        log_to_mlflow(results, records, name)


def log_to_mlflow(results: Results, records: Sequence[Record], name: str) -> None:
    """Log records that MLflow does not have; what goes wrong there is said, for MLflow is a view of the records."""
    try:
        logged = log_records(results, records, name)
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            traceback.print_exception(error)
        say(f"entrain-bench: runs are recorded, but could not be logged to MLflow: {explain(error)}")
        return
    if logged:
        say(f"logged {logged} runs to {results.root / 'mlflow.db'} (make ui shows them)")
