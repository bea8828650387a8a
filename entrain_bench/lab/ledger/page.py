"""Predicted against published runs: ``calibration.md``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from statistics import median

from entrain_bench.answers.text import markdown_table
from entrain_bench.base.files import write_atomically
from entrain_bench.config.compose import Composer
from entrain_bench.config.tree import config_tree
from entrain_bench.figures._style import MODEL_ERROR
from entrain_bench.lab.ledger.book import Book, load_book
from entrain_bench.lab.ledger.entries import Outcome, entries_of, outcomes_of
from entrain_bench.lab.ledger.forwards import ForwardCase
from entrain_bench.lab.ledger.kernels import kernels_table
from entrain_bench.lab.ledger.predict import Cases
from entrain_bench.lab.ledger.report import Table, tables_of
from entrain_bench.lab.ledger.rows import read_rows
from entrain_bench.lab.ledger.study import Ledger, Study, constants_table, ledger_with, study_of
from entrain_bench.lab.ledger.summary import NEAR, Errors
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
- **Gradient accumulation.** Kernels that add each microbatch's gradients to the sum are priced where the trainer's code
  has them. In the A100 study they raise Kendall's tau at 30B and 65B and lower it at 13B.
- **Order of layouts.** Equal jobs of the A100 study differ by 0.6% (standard deviation). This leaves a perfect
  predictor a tau of 0.95 or more (attainable). At 13B on 64 GPUs, runs with FlashAttention 2 and PP 2 take up to 1.63
  times as long as the same layouts with FlashAttention 1.0.8. Published orders then agree less with each other (other
  kernels) than with predictions. At 30B on 256 GPUs the unknown network decides: the slowest of its range gives a tau
  of 0.71 to 0.78, the fastest 0.05 to 0.37. At 13B on 32 GPUs, PP 2 is predicted too fast; the cause is not known.
- **A40.** BERT runs ask for twice the rate that Entrain's ranges of forwards permit. The committed rate is the greatest
  that keeps the ranges, so BERT on the A40 is predicted to take 1.6 times as long. The ranges' samples are not
  published.
- **BERT.** BERT base on the H100 is predicted 6% too fast, BERT large 1%. Masks of dropout in memory are not priced:
  with them peaks are 11% off, but 50 instead of 582 of 602 runs fit, since their microbatches fill the GPU and the
  suite keeps 10% of memory free and 10% for the allocator (without both margins 588 fit into 95%).
- **Host.** Every kernel takes the same time to issue; garbage collection and data loading are not priced.
- **Multimodal training.** No row has an encoder, apart from the forwards on the A40.

What the ledger leaves open is a posterior: `experiments/posterior.csv` holds 50 sets of factors per device that agree
with the rows (`entrain-bench ledger posterior=FILE`). The key `constants` applies a set.
"""


def calibration_output() -> runs.Output:
    """The document; it needs no run."""
    details = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((config_tree() / "ledger").iterdir())]
    return runs.Output("calibration", [], write_calibration, [NAME], files=[ERROR], details=details)


def write_calibration(study: runs.Study) -> str:
    """Write ``calibration.md`` and its model error; returns what is wrong in the error that figures state."""
    book = load_book()
    composer = Composer()
    ledger = ledger_of(book, composer)
    fitted = study_of(ledger)
    left_out = fitted.left_out(ledger)
    line = model_error(left_out)
    write_atomically(study.results.root / NAME, page(ledger, fitted, left_out, book, composer).encode())
    write_atomically(study.results.root / ERROR, f"{line[0].upper()}{line[1:]}.\n".encode())
    return "" if line == MODEL_ERROR else f"figures/_style.py: MODEL_ERROR must be {line!r}"


def ledger_of(book: Book, composer: Composer) -> Ledger:
    """All committed rows with their cases, the ranges of forwards, and single products."""
    cases = Cases(composer)
    entries = (entry for path in book.tables for entry in entries_of(read_rows(path), book, cases))
    return ledger_with(entries, composer)


def page(ledger: Ledger, fitted: Study, left_out: Sequence[Outcome], book: Book, composer: Composer) -> str:
    """The text of the document, from the outcomes of sources left out."""
    line = model_error(left_out)
    configured = next(iter(tables_of(outcomes_of(ledger.entries), book)))
    return "\n".join(
        [
            INTRODUCTION,
            f"**{line[0].upper()}{line[1:]}**, from the middle of what is predicted.",
            _from_ends(left_out),
            *(_section(table) for table in tables_of(left_out, book)),
            _section(("Sources with the committed constants", *configured[1:])),
            _section(constants_table(fitted)),
            _section(_expectations(fitted)),
            _section(_forwards(ledger.forwards)),
            _section(kernels_table(composer)),
            MISSING,
        ]
    )


def model_error(outcomes: Iterable[Outcome]) -> str:
    """Return the model error that figures state, with errors from the middle of predicted ranges."""
    middles = [
        abs(outcome.seconds.middle / outcome.row.published_s - 1.0)
        for outcome in outcomes
        if outcome.seconds is not None and outcome.row.published_s is not None and outcome.ratio is not None
    ]
    if not middles:
        return "model error: not measured"
    near = sum(size <= NEAR for size in middles) / len(middles)
    count = f"{len(middles):,} published iteration times, each source left out of the fit"
    return f"model error: median {100 * median(middles):.1f}%, {near:.0%} within 10%, over {count}"


def _from_ends(outcomes: Iterable[Outcome]) -> str:
    errors = Errors.of(outcomes)
    if errors is None:
        return ""
    width = f"Rows that leave settings open have ranges (median width over all rows {errors.width:.0%})."
    return f"{width} From the nearest end: median {100 * errors.error:.1f}%, {errors.near:.0%} within 10%, as below.\n"


def _section(table: Table) -> str:
    title, heading, rows = table
    return f"## {title}\n\n" + markdown_table(heading, rows, right=heading[1:])


def _expectations(fitted: Study) -> Table:
    rows = [[each.knob.name, f"{each.usual:g}", f"{100 * each.spread:.0f}%", each.why] for each in fitted.constants]
    return "What is expected before a fit", ["constant", "median", "standard deviation", "why"], rows


def _forwards(cases: Sequence[ForwardCase]) -> Table:
    rows = []
    for case in cases:
        row = case.row
        found = case.predicted_ms()
        inside = "yes" if row.least_ms <= found <= row.most_ms else "no"
        published = f"{row.least_ms:.0f} to {row.most_ms:.0f}"
        rows.append([f"{row.workload}, {row.model}, {row.module}", published, f"{found:.0f}", inside])
    return "Forwards on the A40", ["forward", "published (ms)", "predicted (ms)", "inside"], rows
