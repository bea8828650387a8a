"""``entrain-bench ledger [KEY=VALUE ...]``: predict published training runs, or your own, and print the errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from entrain_bench.answers.console_table import make_console
from entrain_bench.base.files import write_atomically
from entrain_bench.commands.watch import say
from entrain_bench.config.compose import Composer
from entrain_bench.config.constants import draws_text
from entrain_bench.config.grammar import Folder, Request, Verb, own
from entrain_bench.lab.ledger.draws import draw_constants
from entrain_bench.lab.ledger.fit import (
    FITTED,
    complete_ledger,
    constants_table,
    fit_ledger,
    fitted_kernels_table,
)
from entrain_bench.lab.ledger.jobs import Book, load_book, read_rows
from entrain_bench.lab.ledger.kernels import kernels_by_source_table, read_kernels, read_products
from entrain_bench.lab.ledger.page import COLUMNS, make_frame, make_tables
from entrain_bench.lab.ledger.predict import Cases, Entry, make_entries, predict_entries

NUMBERS = "%.6g"


@dataclass(frozen=True, slots=True)
class Keys(Folder):
    """Own keys."""

    ledger: str | None = own(None, "CSV of runs in the columns of experiments/ledger; null: that folder's tables")
    fit: bool = own(False, "fit constants to that folder's tables and yours; print them and errors of sources left out")
    posterior: str | None = own(None, "file to write: sets of constants that the tables permit (50 a device)")


VERB = Verb(Keys, examples=["", "ledger=mine.csv", "ledger=mine.csv fit=true"])


def main(request: Request[Keys]) -> int:
    """Predict every row, write ``ledger.csv``, and print tables; ``UserError`` for a wrong table."""
    book = load_book()
    composer = Composer()
    cases = Cases(composer)
    console = make_console()
    keys = request.keys
    names = {name: source.name for name, source in book.sources.items()}
    users = _entries([Path(keys.ledger)], book, cases) if keys.ledger else []
    committed = [] if users and not (keys.fit or keys.posterior) else _entries(book.tables, book, cases)
    frame = make_frame(predict_entries(users or committed))
    text = frame[[*COLUMNS]].to_csv(index=False, float_format=NUMBERS, lineterminator="\n")
    write_atomically(Path(keys.results_dir) / "ledger.csv", text.encode())
    for table in make_tables(frame, names):
        _print(console, *table)
    if not users:
        kernels = [*read_kernels(), *read_products(book.products)]
        _print(console, *kernels_by_source_table(kernels, composer))
    if keys.fit or keys.posterior:
        ledger = complete_ledger([*committed, *users], composer)
        say(f"fitting {len(FITTED)} constants a device")
        study = fit_ledger(ledger)
        for table in (constants_table(study), fitted_kernels_table(composer)):
            _print(console, *table)
        for title, heading, rows in make_tables(make_frame(study.left_out(ledger)), names):
            _print(console, f"Each source left out of the fit: {title}", heading, rows)
        if keys.posterior:
            text = draws_text(draw_constants(ledger, study.fit.error))
            write_atomically(Path(keys.posterior), text.encode())
    composer.save()
    return 0


def _entries(paths: Iterable[Path], book: Book, cases: Cases) -> list[Entry]:
    entries = list[Entry]()
    for path in paths:
        of_table = [*make_entries(read_rows(path), book, cases)]
        usable = sum(not entry.reason for entry in of_table)
        say(f"{path.name}: {len(of_table):,} rows, {usable:,} of them can be predicted")
        entries += of_table
    return entries


def _print(console: Console, title: str, heading: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for place, name in enumerate(heading):
        table.add_column(name, justify="right" if place else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
