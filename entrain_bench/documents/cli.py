"""The command line of the documents: run what is missing, measure, write."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from entrain_bench.cli import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USER_ERROR
from entrain_bench.documents.claims import NOT_MEASURED, claim_row, claims_markdown, claims_table, load_claims
from entrain_bench.documents.results import results_document
from entrain_bench.errors import UserError
from entrain_bench.records.records import write_atomically
from entrain_bench.sweeps import Sweeps


def main(arguments: Sequence[str]) -> int:
    """Write both documents.

    Returns:
        0; 1 if a run has no result, 2 for bad input, 130 if interrupted.
    """
    parser = argparse.ArgumentParser(
        prog="python -m entrain_bench.documents",
        description="Run what is missing; write <results-dir>/claims.csv, <docs-dir>/claims.md and results.md.",
    )
    parser.add_argument("--results-dir", default="results", help="where runs are (default: results)")
    parser.add_argument("--docs-dir", default="docs", help="where the documents go (default: docs)")
    options = parser.parse_args(arguments)
    try:
        return write_documents(Sweeps(options.results_dir), Path(options.docs_dir))
    except UserError as error:
        print(f"documents: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("interrupted; finished runs are kept", file=sys.stderr)
        return EXIT_INTERRUPTED


def write_documents(sweeps: Sweeps, docs: Path) -> int:
    """Write the claims and the results; returns 0, or 1 if anything is missing."""
    sweeps.results.check_writable()
    rows = [claim_row(claim, sweeps) for claim in load_claims()]
    csv = claims_table(rows).to_csv(index=False, lineterminator="\n")
    write_atomically(sweeps.results.root / "claims.csv", csv.encode())
    write_atomically(docs / "claims.md", claims_markdown(rows).encode())
    text, problem = results_document(sweeps)
    write_atomically(docs / "results.md", text.encode())
    missing = [f"{row['name']}: {row['verdict']}" for row in rows if row["verdict"].startswith(NOT_MEASURED)]
    for line in filter(None, [*missing, problem]):
        print(f"documents: incomplete: {line}", file=sys.stderr)
    return EXIT_FAILED if missing or problem else 0
