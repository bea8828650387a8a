"""``entrain-bench reference``: what is committed of the results brought up to date, with a word on every change."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from entrain_bench.commands.outputs import make, outputs
from entrain_bench.commands.watch import say
from entrain_bench.errors import UserError
from entrain_bench.files import write_atomically
from entrain_bench.records.compare import drifts, read_text
from entrain_bench.records.records import Results, sorted_records, table_csv
from entrain_bench.study import Output, Study

EXIT_FAILED = 1
TABLE = "table.csv"
# Wall times, which are others every time.
MEASURED = "measured_gantt"
# Other machines may draw other pixels; the data of a figure decide.
COMPARED = ".csv"


@dataclass(frozen=True, slots=True)
class Reference:
    """The committed results: the table and figures of ``results/reference``, and the documents in ``docs``."""

    results: Path
    documents: Path

    def check(self) -> None:
        """Raise ``UserError`` unless both folders are there."""
        for option, folder in (("--reference-dir", self.results), ("--docs-dir", self.documents)):
            if not folder.is_dir():
                raise UserError(f"{option}={folder}: must be a folder; run this where the repository is checked out")

    def path_of(self, file: Path) -> Path:
        """Where a generated file is committed, by its path in a folder of results."""
        return self.documents / file.name if file.suffix == ".md" else self.results / file


def main(arguments: Sequence[str]) -> int:
    """Make all outputs and commit them to the reference.

    Returns:
        0, or 1 if a cell failed or data is missing, and nothing was written then.

    Raises:
        UserError: for missing folders.
    """
    parser = argparse.ArgumentParser(
        prog="entrain-bench reference",
        description="Run what is missing, and bring results/reference and docs up to date; says what changed.",
    )
    parser.add_argument("--results-dir", default="results", help="where runs are (default: results)")
    parser.add_argument("--measured", action="store_true", help="train for the measured schedule, too (make measured)")
    reference, options = parse(parser, arguments)
    wanted = [*outputs(), *(outputs([MEASURED]) if options.measured else [])]
    study = Study(Results(Path(options.results_dir)))
    if not make(wanted, study):
        say("results/reference and docs are left as they were")
        return EXIT_FAILED
    changed, charged = changes(reference, wanted, study)
    for line in (*changed, *charged):
        print(line)
    for file, content in generated(wanted, study):
        if not reference.path_of(file).exists() or reference.path_of(file).read_bytes() != content:
            write_atomically(reference.path_of(file), content)
    print(f"{len(changed)} changes")
    return 0


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[Reference, argparse.Namespace]:
    """The options that commands on the reference share: where it is."""
    parser.add_argument("--reference-dir", default="results/reference", help="the committed table and figures")
    parser.add_argument("--docs-dir", default="docs", help="the committed documents")
    options = parser.parse_args(arguments)
    reference = Reference(Path(options.reference_dir), Path(options.docs_dir))
    reference.check()
    return reference, options


def generated(wanted: Sequence[Output], study: Study) -> Iterator[tuple[Path, bytes]]:
    """Every file that outputs have written, and the table of their runs: path in the folder of results, content."""
    cells = {cell.key: cell for output in wanted for sweep in output.sweeps for cell in study.cells(*sweep)}
    records = sorted_records(record for key in cells if (record := study.results.read(key)))
    if records:
        yield Path(TABLE), table_csv(records).encode()
    for output in wanted:
        for file in output.committed:
            yield Path(file), (study.results.root / file).read_bytes()


def changes(reference: Reference, wanted: Sequence[Output], study: Study) -> tuple[list[str], list[str]]:
    """What is not as it is committed, a line for every value of the table, figure and document.

    Returns:
        Other results, and other wall times where these stand for results.
    """
    found, charged = list[str](), list[str]()
    for file, content in generated(wanted, study):
        path = reference.path_of(file)
        before = path.read_bytes() if path.exists() else b""
        if file.name == TABLE:
            after = read_text(content.decode())
            for drift in drifts(read_text(before.decode()) if before else after[:0], after):
                (charged if drift.charged else found).append(str(drift))
        elif file.suffix in (COMPARED, ".md") and before != content:
            found.append(f"{path}: {'differs' if before else 'new'}")
    return found, charged
