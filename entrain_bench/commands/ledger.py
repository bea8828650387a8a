"""``entrain-bench ledger [KEY=VALUE ...]``: predict published training runs, or your own, and print the errors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from entrain_bench.answers.console_table import print_texts
from entrain_bench.base.files import write_atomically
from entrain_bench.commands.watch import say
from entrain_bench.config.compose import Composer
from entrain_bench.config.constants import draws_text
from entrain_bench.config.grammar import Folder, Request, Verb, own
from entrain_bench.lab.ledger.draws import draw_constants
from entrain_bench.lab.ledger.fit import FITTED, complete_ledger, fit_ledger
from entrain_bench.lab.ledger.jobs import load_book, read_rows
from entrain_bench.lab.ledger.page import COLUMNS, constants_table, kernels_table, make_tables
from entrain_bench.lab.ledger.predict import Entry, case_maker, make_entries, predictor


@dataclass(frozen=True, slots=True)
class Keys(Folder):
    """Own keys."""

    ledger: str | None = own(None, "CSV of runs in the columns of experiments/ledger; null: that folder's tables")
    fit: bool = own(
        False, "fit constants to that folder's tables and yours; print them and leave-one-source-out errors"
    )
    posterior: str | None = own(None, "file to write: sets of constants that the tables permit (50 a device)")


VERB = Verb(Keys, examples=["", "ledger=mine.csv", "ledger=mine.csv fit=true"])


def main(request: Request[Keys]) -> int:
    """Predict every row, write ``ledger.csv``, and print tables; ``UserError`` for a wrong table."""
    keys = request.keys
    book = load_book()
    composer = Composer()
    make = case_maker(composer)
    paths = [Path(keys.ledger)] if keys.ledger else [*book.tables]
    if keys.ledger and (keys.fit or keys.posterior):
        paths += book.tables
    entries = dict[Path, list[Entry]]()
    for path in paths:
        entries[path] = [*make_entries(read_rows(path), book, make)]
        usable = sum(not entry.reason for entry in entries[path])
        say(f"{path.name}: {len(entries[path]):,} rows, {usable:,} of them can be predicted")
    rows = [entry for of_path in entries.values() for entry in of_path]
    predict = predictor()
    frame = pd.DataFrame(entry.line(predict) for entry in (entries[paths[0]] if keys.ledger else rows))
    text = frame[[*COLUMNS]].to_csv(index=False, float_format="%.6g", lineterminator="\n")
    write_atomically(Path(keys.results_dir) / "ledger.csv", text.encode())
    names = {name: source.name for name, source in book.sources.items()}
    tables = [*make_tables(frame, names)]
    if keys.fit or keys.posterior:
        ledger = complete_ledger(rows, composer)
        say(f"fitting {len(FITTED)} constants a device")
        study = fit_ledger(ledger)
        tables += [constants_table(study), kernels_table(ledger)]
        left_out = make_tables(pd.DataFrame(study.left_out(ledger)), names)
        tables += [(f"Each source left out of the fit: {title}", table) for title, table in left_out]
        if keys.posterior:
            text = draws_text(draw_constants(ledger, study.fit.error))
            write_atomically(Path(keys.posterior), text.encode())
    for title, rows_of_table in tables:
        if rows_of_table.empty:
            continue
        print_texts([*rows_of_table.columns], rows_of_table.to_numpy().tolist(), title)
        print()
    composer.save()
    return 0
