"""``entrain-bench reference [KEY=VALUE ...]``: update the committed results, and list every change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from entrain_bench.answers.compare import drifts, read_file
from entrain_bench.answers.documents.listings import listings
from entrain_bench.answers.documents.results import BELIEFS, beliefs_markdown
from entrain_bench.answers.documents.tables import TABLES, WAY_UP, splice
from entrain_bench.base.errors import UserError
from entrain_bench.base.files import write_atomically
from entrain_bench.commands.outputs import make, outputs, reference_outputs
from entrain_bench.commands.watch import say
from entrain_bench.config.grammar import Request, Verb, own
from entrain_bench.records.records import Results, sorted_records
from entrain_bench.records.tables import parquet_of, table_of
from entrain_bench.run.study import Output, Study

EXIT_FAILED = 1
TABLE = "table.parquet"
# Text by hand, tables by the suite: pages from the folder of documents, and the way from there to the top.
PAGES = {
    **dict.fromkeys(("configuration.md", "constants.md", "costs.md", "models.md", "tuning.md"), "../"),
    "strategies/*.md": WAY_UP,
    "../README.md": "",
}
# Wall times, which are others every time: a figure is committed, no row of the table.
MEASURED = "measured_gantt"
# Other machines may draw other pixels; the data of a figure decide.
COMPARED = ".csv"


@dataclass(frozen=True, slots=True)
class Committed:
    """Keys of the committed results: files of ``results/reference``, documents in ``docs``, tables on its pages."""

    reference_dir: str = own("results/reference", "folder of the committed table and figures")
    docs_dir: str = own("docs", "folder of the committed documents and pages")

    def check(self) -> None:
        """Raise ``UserError`` unless both folders are there."""
        for option, folder in (("reference_dir", self.reference_dir), ("docs_dir", self.docs_dir)):
            if not Path(folder).is_dir():
                raise UserError(f"{option}={folder}: must be a folder; run this where the repository is checked out")


@dataclass(frozen=True, slots=True)
class Keys(Committed):
    """Own keys."""

    results_dir: str = own("results")
    measured: bool = own(False, "also train on 4 ranks of this machine for the figure measured_gantt")


VERB = Verb(Keys, options=())


def main(request: Request[Keys]) -> int:
    """Make all outputs and commit them to the reference; ``UserError`` for missing folders.

    Returns 0, or 1, with nothing written, if a cell failed or data is missing.
    """
    keys = request.keys
    keys.check()
    wanted = [*reference_outputs(), *(outputs([MEASURED]) if keys.measured else [])]
    study = Study(Results(Path(keys.results_dir)))
    if not make(wanted, study):
        say("results/reference and docs are unchanged")
        return EXIT_FAILED
    changed = changes(keys, wanted, study)
    for line in changed:
        print(line)
    for path, content in generated(keys, wanted, study):
        if not path.exists() or path.read_bytes() != content:
            write_atomically(path, content)
    print(f"{len(changed)} changes")
    return 0


def generated(committed: Committed, wanted: Sequence[Output], study: Study) -> Iterator[tuple[Path, bytes]]:
    """Every committed file as the outputs have made it: tables of their runs, own files, pages with tables."""
    results = Path(committed.reference_dir)
    documents = Path(committed.docs_dir)
    # Reference times differ in constants of their clusters, which the table's rows do not show.
    apart = (MEASURED, "calibration")
    cells = study.cells_by_key(sweep for output in wanted if output.name not in apart for sweep in output.needed(study))
    records = sorted_records(record for key in cells if (record := study.results.read(key)))
    tables = listings() | {path.stem: path.read_text() for path in (study.results.root / TABLES).glob("*.md")}
    if records:
        runs = table_of(records)
        tables[BELIEFS] = beliefs_markdown(runs)
        yield results / TABLE, parquet_of(runs)
    for output in wanted:
        for file in map(Path, output.committed):
            yield (documents if file.suffix == ".md" else results) / file, (study.results.root / file).read_bytes()
    for pattern, way_up in PAGES.items():
        for page in sorted(documents.glob(pattern)):
            yield page, splice(page.read_text(), tables, way_up).encode()


def changes(committed: Committed, wanted: Sequence[Output], study: Study) -> list[str]:
    """Return a line for every value that differs from the committed table, figure, document or page."""
    lines = list[str]()
    for path, content in generated(committed, wanted, study):
        before = path.read_bytes() if path.exists() else b""
        if path.name == TABLE:
            after = read_file(content)
            lines += drifts(read_file(before) if before else after[:0], after)
        elif path.suffix in (COMPARED, ".md") and before != content:
            lines.append(f"{path}: {'differs' if before else 'new'}")
    return lines
