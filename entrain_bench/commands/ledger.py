"""``entrain-bench ledger [KEY=VALUE ...]``: predict published training runs, or your own, and print the errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from entrain_bench.answers.console_table import make_console
from entrain_bench.base.files import write_atomically
from entrain_bench.commands.watch import say
from entrain_bench.config.compose import Composer
from entrain_bench.config.grammar import Folder, Request, Verb, own
from entrain_bench.figures._runner import render
from entrain_bench.lab.ledger import figure
from entrain_bench.lab.ledger.book import Book, load_book
from entrain_bench.lab.ledger.entries import Entry, Outcome, entries_of, outcomes_of
from entrain_bench.lab.ledger.predict import Cases
from entrain_bench.lab.ledger.report import frame_of, tables_of
from entrain_bench.lab.ledger.rows import read_rows

NAME = "ledger"
NUMBERS = "%.6g"


@dataclass(frozen=True, slots=True)
class Keys(Folder):
    """Own keys."""

    ledger: str | None = own(None, "CSV of runs in the columns of experiments/ledger; null: that folder's tables")


VERB = Verb(Keys, examples=["", "ledger=mine.csv"])


def main(request: Request[Keys]) -> int:
    """Predict every row, write ``ledger.csv`` and the figure, and print tables; ``UserError`` for a wrong table."""
    book, composer = load_book(), Composer()
    paths = [Path(request.keys.ledger)] if request.keys.ledger else [*book.tables]
    entries = list[Entry]()
    cases = Cases(composer)
    for path in paths:
        own_entries = [*entries_of(read_rows(path), book, cases)]
        usable = sum(not entry.reason for entry in own_entries)
        say(f"{path.name}: {len(own_entries):,} rows, {usable:,} of them can be predicted")
        entries += own_entries
    outcomes = outcomes_of(entries)
    composer.save()
    write(Path(request.keys.results_dir), outcomes, book)
    console = make_console()
    for title, heading, rows in tables_of(outcomes, book):
        _print(console, title, heading, rows)
    return 0


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
