"""``entrain-bench ledger [KEY=VALUE ...]``: predict published training runs, or your own, and print the errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from entrain_bench.answers.console_table import make_console
from entrain_bench.answers.documents.claim import load_claims
from entrain_bench.base.files import write_atomically
from entrain_bench.commands.watch import say
from entrain_bench.config.compose import Composer
from entrain_bench.config.constants import draws_text
from entrain_bench.config.grammar import Folder, Request, Verb, own
from entrain_bench.figures._runner import render
from entrain_bench.lab.ledger import figure
from entrain_bench.lab.ledger.book import Book, load_book
from entrain_bench.lab.ledger.constants import FITTED
from entrain_bench.lab.ledger.entries import Entry, Outcome, entries_of, outcomes_of
from entrain_bench.lab.ledger.kernels import kernels_table, read_kernels
from entrain_bench.lab.ledger.papers import of_papers
from entrain_bench.lab.ledger.predict import Cases
from entrain_bench.lab.ledger.products import kernel_table, read_products
from entrain_bench.lab.ledger.report import frame_of, tables_of
from entrain_bench.lab.ledger.rows import read_rows
from entrain_bench.lab.ledger.study import constants_table, ledger_with, posterior, study_of

NAME = "ledger"
NUMBERS = "%.6g"


@dataclass(frozen=True, slots=True)
class Keys(Folder):
    """Own keys."""

    ledger: str | None = own(None, "CSV of runs in the columns of experiments/ledger; null: that folder's tables")
    fit: bool = own(False, "fit constants to that folder's tables and yours; print them and errors of sources left out")
    posterior: str | None = own(None, "file to write: sets of constants that the tables permit (50 a device)")


VERB = Verb(Keys, examples=["", "ledger=mine.csv", "ledger=mine.csv fit=true"])


def main(request: Request[Keys]) -> int:
    """Predict every row, write ``ledger.csv`` and the figure, and print tables; ``UserError`` for a wrong table."""
    book = load_book()
    composer = Composer()
    cases = Cases(composer)
    keys = request.keys
    mine = [Path(keys.ledger)] if keys.ledger else []
    shown = _entries(mine or book.tables, book, cases)
    papers = [] if mine else [*of_papers(load_claims(), composer)]
    outcomes = outcomes_of([*shown, *papers])
    write(Path(keys.results_dir), outcomes, book)
    _show("", outcomes, book)
    if not mine:
        _print(make_console(), *kernel_table([*read_kernels(), *read_products(book.products)], composer))
    if keys.fit or keys.posterior:
        entries = [*(_entries(book.tables, book, cases) if mine else ()), *shown]
        ledger = ledger_with(entries, composer)
        say(f"fitting {len(FITTED)} constants a device")
        study = study_of(ledger)
        for table in (constants_table(study), kernels_table(composer)):
            _print(make_console(), *table)
        _show("Each source left out of the fit: ", study.left_out(ledger), book)
        if keys.posterior:
            draws = posterior(ledger, study.fit.error)
            write_atomically(Path(keys.posterior), draws_text(draws).encode())
    composer.save()
    return 0


def _entries(paths: Iterable[Path], book: Book, cases: Cases) -> list[Entry]:
    found = list[Entry]()
    for path in paths:
        own_entries = [*entries_of(read_rows(path), book, cases)]
        usable = sum(not entry.reason for entry in own_entries)
        say(f"{path.name}: {len(own_entries):,} rows, {usable:,} of them can be predicted")
        found += own_entries
    return found


def _show(prefix: str, outcomes: Sequence[Outcome], book: Book) -> None:
    console = make_console()
    for title, heading, rows in tables_of(outcomes, book):
        _print(console, prefix + title, heading, rows)


def write(results: Path, outcomes: Sequence[Outcome], book: Book) -> None:
    """Write ``ledger.csv`` and ``figures/ledger.{pdf,png,csv}`` into the folder of results."""
    frame = frame_of(outcomes)
    text = frame.to_csv(index=False, float_format=NUMBERS, lineterminator="\n")
    write_atomically(results / f"{NAME}.csv", text.encode())
    names = {name: source.name for name, source in book.sources.items()}
    for suffix, content in render(lambda: figure.draw(frame, names)).items():
        write_atomically(results / "figures" / f"{NAME}.{suffix}", content)


def _print(console: Console, title: str, heading: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for place, name in enumerate(heading):
        table.add_column(name, justify="right" if place else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
