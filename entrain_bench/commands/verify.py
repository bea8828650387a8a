"""``entrain-bench verify``: every committed result computed anew on this machine, every drift named."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from entrain_bench.commands.outputs import make, reference_outputs
from entrain_bench.commands.reference import changes, parse
from entrain_bench.records.records import Results
from entrain_bench.run.study import Study

EXIT_FAILED = 1


def main(arguments: Sequence[str]) -> int:
    """Run everything in a folder of its own and compare.

    Returns:
        0 if all is as committed to the last digit, else 1.

    Raises:
        UserError: for missing folders.
    """
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="entrain-bench verify",
        description="Run all reference cells anew and compare table, figures' data, documents and the tables on pages "
        "with the committed ones, to the last digit; ends with 1 and names every drift if there is one.",
    )
    reference, _ = parse(parser, arguments)
    wanted = reference_outputs()
    with TemporaryDirectory(prefix="entrain-bench-") as folder:
        study = Study(Results(Path(folder)))
        complete = make(wanted, study, mlflow=False)
        drifted = changes(reference, wanted, study)
    for line in drifted:
        print(line)
    print(f"{len(drifted)} drifts from {reference.results}" + ("" if complete else "; some cells have no result"))
    return EXIT_FAILED if drifted or not complete else 0
