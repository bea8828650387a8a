"""``entrain-bench figures [name ...]``: figures and documents, brought up to date."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from entrain_bench.commands.outputs import make, outputs, summaries
from entrain_bench.records.records import Results
from entrain_bench.run.study import Study

EXIT_FAILED = 1


def main(arguments: Sequence[str]) -> int:
    """Bring the named figures and documents up to date, or all that are not made on request only.

    Returns:
        0, or 1 if a cell failed or data is missing.

    Raises:
        UserError: for unknown names, and a folder that cannot be written.
    """
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="entrain-bench figures",
        description="Run what is missing; draw <results-dir>/figures/<name>.{pdf,png,csv} and write documents.",
        epilog="names:\n" + "\n".join(f"  {name:22}{summary}" for name, summary in summaries().items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="name", help="what to make; default: all that needs no training")
    parser.add_argument("--results-dir", default="results", help="where runs are and files go (default: results)")
    parser.add_argument("--config-dir", help="a folder of yours with further strategies, workloads, claims")
    parser.add_argument("--mlflow-uri", help="a tracking server to log runs to (default: <results-dir>/mlflow.db)")
    parser.add_argument("--retry-failed", action="store_true", help="run every failed cell again")
    options = parser.parse_args(arguments)
    study = Study(Results(Path(options.results_dir)), options.config_dir)
    wanted = outputs(options.names, options.config_dir)
    made = make(wanted, study, mlflow_uri=options.mlflow_uri, retry_failed=options.retry_failed)
    return 0 if made else EXIT_FAILED
