"""``calibration.md``: predicted against published runs."""

from __future__ import annotations

import hashlib

import pandas as pd

from entrain_bench.answers.text import markdown_table
from entrain_bench.base.files import write_atomically
from entrain_bench.config.compose import Composer
from entrain_bench.config.tree import config_tree
from entrain_bench.figures._style import MODEL_ERROR
from entrain_bench.lab.ledger.jobs import Book, load_book
from entrain_bench.lab.ledger.kernels import forwards_table
from entrain_bench.lab.ledger.predict import Cases, make_entries, predict_entries
from entrain_bench.lab.ledger.rows import read_rows
from entrain_bench.lab.ledger.study import (
    Ledger,
    Study,
    complete_ledger,
    constants_table,
    expectations_table,
    fit_ledger,
    fitted_kernels_table,
)
from entrain_bench.lab.ledger.tables import (
    Table,
    errors_from_ends,
    make_frame,
    make_tables,
    model_error,
    sources_table,
)
from entrain_bench.run import study as runs

# The page, and its model error alone, for pages that show no table.
NAME = "calibration.md"
ERROR = "tables/model_error.md"
INTRODUCTION = """# Calibration

How well the cost model predicts training that others measured (`entrain-bench figures calibration`). The ledger
(`experiments/ledger`) holds all rows of the published tables. The cost model predicts each row that states enough. If a
row leaves a setting open, the prediction is a range, and its error counts from the nearest end. `entrain-bench ledger`
prints these tables for the committed constants, or for your own measurements (`ledger=mine.csv fit=true`).

Constants are fitted by source: least squares of log times, where all rows of a source share an offset, so that a source
of 400 rows counts hardly more than one of 20. A row whose range holds its published time permits all constants that
keep it there. Single products are fitted together with the runs.
Nothing is fitted to a result of a strategy. **The errors below are those of sources left out**: each source is
predicted with constants fitted to the other sources.
"""
MISSING = """## What is missing

- **Settings that sources do not state** (networks, microbatches, versions of kernels) widen the predicted ranges.
- **Trainers of the past.** One setting (`kernels`, fused or eager) stands for RMSNorms, biases and dropout of single
  operators. Until 2026-11 the suite priced each of them, gates, attention and Adam of single operators, and Apex: 1,184
  times with a median error of 5.8%, each source left out of the fit. The committed constants were fitted then; a fit to
  these rows (above) differs. Those of the A40 and the H200 rest on BERT runs (Lambda). The A40 is predicted 1.5
  times as slow as published: its rate is the greatest that keeps the ranges of its forwards.
- **Unfused optimizers.** InternEvo's Adam keeps temporary values, which are not priced: its peaks are 44% off.
- **Order of layouts.** Equal jobs of the A100 study differ by 0.6% (standard deviation). At 30B on 256 GPUs the unknown
  network decides.
- **Host.** Every kernel takes the same time to issue; garbage collection and data loading are not priced.
- **Multimodal training.** No row has an encoder, apart from the forwards on the A40.

The ledger does not fix every constant. `experiments/posterior.csv` holds 50 sets of factors per device that agreed with
the rows when the constants were fitted. `entrain-bench ledger posterior=FILE` draws from the rows that are left.
The key `constants` applies a set.
"""


def calibration_output() -> runs.Output:
    """The document; it needs no run."""
    details = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((config_tree() / "ledger").iterdir())]
    return runs.Output("calibration", [], write_calibration, [NAME], files=[ERROR], details=details)


def write_calibration(study: runs.Study) -> str:
    """Write ``calibration.md`` and its model error; returns what is wrong in the error that figures state."""
    book = load_book()
    composer = Composer()
    ledger = committed_ledger(book, composer)
    fitted = fit_ledger(ledger)
    left_out = make_frame(fitted.left_out(ledger))
    line = model_error(left_out)
    write_atomically(study.results.root / NAME, make_page(ledger, fitted, left_out, book, composer).encode())
    write_atomically(study.results.root / ERROR, f"{line[0].upper()}{line[1:]}.\n".encode())
    return "" if line == MODEL_ERROR else f"figures/_style.py: MODEL_ERROR must be {line!r}"


def committed_ledger(book: Book, composer: Composer) -> Ledger:
    """All committed rows with their cases, the ranges of forwards, and single products."""
    cases = Cases(composer)
    entries = (entry for path in book.tables for entry in make_entries(read_rows(path), book, cases))
    return complete_ledger(entries, composer)


def make_page(ledger: Ledger, fitted: Study, left_out: pd.DataFrame, book: Book, composer: Composer) -> str:
    """The text of the document; ``left_out`` is the frame of outcomes of sources left out of the fit."""
    line = model_error(left_out)
    names = {name: source.name for name, source in book.sources.items()}
    _, heading, rows = sources_table(make_frame(predict_entries(ledger.entries)), names)
    return "\n".join(
        [
            INTRODUCTION,
            f"**{line[0].upper()}{line[1:]}**, from the middle of what is predicted.",
            errors_from_ends(left_out),
            *(_section(table) for table in make_tables(left_out, names)),
            _section(("Sources with the committed constants", heading, rows)),
            _section(constants_table(fitted)),
            _section(expectations_table(fitted.constants)),
            _section(forwards_table(ledger.forwards)),
            _section(fitted_kernels_table(composer)),
            MISSING,
        ]
    )


def _section(table: Table) -> str:
    title, heading, rows = table
    return f"## {title}\n\n" + markdown_table(heading, rows, right=heading[1:])
