"""``entrain-bench verify [KEY=VALUE ...]``: recompute all committed results and list every difference."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from entrain_bench.commands.outputs import make, reference_outputs
from entrain_bench.commands.reference import Committed, changes, reference_of
from entrain_bench.config.grammar import Request, Verb
from entrain_bench.records.records import Results
from entrain_bench.run.study import Study

EXIT_FAILED = 1
VERB = Verb(Committed, options=())


def main(request: Request[Committed]) -> int:
    """Run everything in a folder of its own and compare.

    Returns:
        0 if all is as committed to the last digit, else 1.

    Raises:
        UserError: for missing folders.
    """
    reference = reference_of(request.keys)
    wanted = reference_outputs()
    with TemporaryDirectory(prefix="entrain-bench-") as folder:
        study = Study(Results(Path(folder)))
        complete = make(wanted, study, mlflow=False)
        drifted = changes(reference, wanted, study)
    for line in drifted:
        print(line)
    print(f"{len(drifted)} drifts from {reference.results}" + ("" if complete else "; some cells have no result"))
    return EXIT_FAILED if drifted or not complete else 0
