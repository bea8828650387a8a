"""Predicted against published runs: a line for every row, tables of errors, and ``calibration.md``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

import pandas as pd
from scipy.stats import kendalltau

from entrain_bench.answers.text import markdown_table
from entrain_bench.base.files import write_atomically
from entrain_bench.config.compose import Composer
from entrain_bench.config.tree import config_tree
from entrain_bench.figures._style import MODEL_ERROR
from entrain_bench.lab.ledger.fit import (
    Calibration,
    Ledger,
    complete_ledger,
    constants_table,
    expectations_table,
    fit_ledger,
    fitted_kernels_table,
)
from entrain_bench.lab.ledger.jobs import OK, OOM, Book, load_book, read_rows
from entrain_bench.lab.ledger.kernels import forwards_table
from entrain_bench.lab.ledger.predict import OPEN, Cases, Outcome, Range, Table, make_entries, predict_entries
from entrain_bench.run.study import Output, Study

NEAR = 0.10
# Runs of a group from which their order tells something.
FEWEST_LAYOUTS = 5
NOT_STATED = "not stated"
PREDICTED = "predicted"
LEFT_OUT = "left out"
# Columns that are written.
COLUMNS = (
    "source",
    "row",
    "published_s",
    "predicted_s",
    "ratio",
    "published_gib",
    "predicted_gib",
    "outcome",
    "predicted_outcome",
    "status",
    "reason",
    "least_predicted_s",
    "greatest_predicted_s",
)
OF_ERRORS = ("timed", "median ratio", "median error", "within 10%", "width")
# Columns that runs have in common, by name.
GROUPS = {
    "TP": "tp",
    "sequence": "seq_len",
    "attention": "attention_kernel",
    "recomputation": "recompute",
}
# What runs of one job share, and what those of one set of kernels share besides; layouts of such runs are compared.
JOB = ("source", "model", "seq_len", "gpus", "global_batch", "gpu_type")
KERNELS = ("attention_kernel", "rmsnorm_kernel", "sequence_parallel", "zero_stage", "software")


def make_frame(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """A line for every row: all its fields and its prediction; ``row`` is the line of its file.

    ``predicted_s`` and ``predicted_gib`` are the values in the predicted range that are nearest to the published ones;
    where nothing is published, the middle of the range. ``ratio`` and ``memory_ratio`` are predicted over published
    values, and ``middle_ratio`` is that of the middle of the range.
    """
    return pd.DataFrame([_line(outcome) for outcome in outcomes])


def _line(outcome: Outcome) -> dict[str, object]:
    row = outcome.row
    seconds = outcome.seconds
    published_s = row.published_s
    peak_gib = row.peak_memory_gib
    predicted_s = _nearest(seconds, published_s)
    predicted_gib = _nearest(outcome.gib, peak_gib)
    return asdict(row) | {
        "row": row.line,
        "published_s": published_s,
        "predicted_s": predicted_s,
        "ratio": predicted_s / published_s if predicted_s and published_s else None,
        "middle_ratio": seconds.middle / published_s if seconds and published_s else None,
        "published_gib": peak_gib,
        "predicted_gib": predicted_gib,
        "memory_ratio": predicted_gib / peak_gib if predicted_gib and peak_gib and row.outcome == OK else None,
        "predicted_outcome": outcome.fits,
        "status": LEFT_OUT if outcome.reason else PREDICTED,
        "reason": outcome.reason,
        "least_predicted_s": seconds.low if seconds else None,
        "greatest_predicted_s": seconds.high if seconds else None,
    }


def _nearest(predicted: Range | None, published: float | None) -> float | None:
    if predicted is None:
        return None
    return predicted.nearest(published) if published else predicted.middle


def make_tables(frame: pd.DataFrame, names: Mapping[str, str]) -> Iterator[Table]:
    """Tables: sources, what runs have in common, orders of layouts, and what is left out; ``names`` are of sources."""
    yield sources_table(frame, names)
    for name, column in GROUPS.items():
        # Numbers in their order, then texts in theirs.
        ordered = frame.sort_values(column, kind="stable")
        groups = ordered.groupby(ordered[column].map(_label), sort=False)
        rows = [[str(label), *_errors(group)] for label, group in groups if group["ratio"].notna().any()]
        if len(rows) > 1:
            yield f"By {name}", [name, *OF_ERRORS], rows
    if rows := [*_orders(frame)]:
        yield "Order of layouts", ["job", "layouts", "spread", "Kendall's tau", "lost by predicted best"], rows
    reasons = frame.loc[frame["reason"] != "", "reason"].value_counts()
    if len(reasons):
        counted = sorted(reasons.items(), key=lambda item: (-item[1], str(item[0])))
        yield "Rows left out", ["reason", "rows"], [[str(reason), str(count)] for reason, count in counted]


def _label(value: object) -> str:
    if value is None or value == "" or value != value:
        return NOT_STATED
    return f"{value:.0f}" if isinstance(value, float) else str(value)


def sources_table(frame: pd.DataFrame, names: Mapping[str, str]) -> Table:
    """A row for every source in the order of the rows, and one of all."""
    rows = []
    groups = {names.get(str(source), str(source)): group for source, group in frame.groupby("source", sort=False)}
    for name, group in (groups | {"all": frame}).items():
        peaks = (group["memory_ratio"].dropna().astype(float) - 1.0).abs()
        peak = "" if peaks.empty or name == "all" else f"{peaks.median():.0%}"
        rows.append([name, f"{len(group):,}", *_errors(group), _fits(group), peak])
    return "Sources", ["source", "rows", *OF_ERRORS, "fits or not", "peak error"], rows


def _errors(group: pd.DataFrame) -> list[str]:
    """Runs that have both times, and of them ``OF_ERRORS``."""
    timed = group[group["ratio"].notna()]
    if timed.empty:
        return ["0", *[""] * (len(OF_ERRORS) - 1)]
    ratios = timed["ratio"].astype(float)
    sizes = (ratios - 1.0).abs()
    width = (timed["greatest_predicted_s"] / timed["least_predicted_s"] - 1.0).astype(float).median()
    shown = f"{ratios.median():.3f}", f"{sizes.median():.1%}", f"{(sizes <= NEAR).mean():.0%}", f"{width:.0%}"
    return [f"{len(timed):,}", *shown]


def _fits(group: pd.DataFrame) -> str:
    """Of the runs whose fit is decided, how many are predicted right; how many depend on what rows leave open."""
    predicted = group[group["outcome"].isin([OK, OOM]) & (group["predicted_outcome"] != "")]
    is_open = predicted["predicted_outcome"] == OPEN
    decided = predicted[~is_open]
    if decided.empty:
        return ""
    right = (decided["outcome"] == decided["predicted_outcome"]).sum()
    return f"{right} of {len(decided)}" + (f", {is_open.sum()} open" if is_open.any() else "")


def _orders(frame: pd.DataFrame) -> Iterator[list[str]]:
    """Kendall's tau over the layouts of each job that a source timed in several, one set of kernels at a time.

    ``spread``: how much slower the slowest is than the fastest; the last column, the one that is predicted to be.
    """
    timed = frame[frame["ratio"].notna()].copy()
    for _, runs in timed.groupby([*JOB, *KERNELS], sort=False, dropna=False):
        if len(runs) < FEWEST_LAYOUTS:
            continue
        published = runs["published_s"].astype(float)
        predicted = published * runs["middle_ratio"].astype(float)
        fastest = published.min()
        lost = published.iloc[int(predicted.argmin())] / fastest - 1.0
        numbers = f"{published.max() / fastest - 1.0:.0%}", f"{kendalltau(published, predicted).statistic:.2f}"
        yield [_job_name(runs.iloc[0]), str(len(runs)), *numbers, f"{lost:.1%}"]


def _job_name(row: pd.Series) -> str:
    parts = [row["model"], f"{row['seq_len']:.0f} tokens", f"{row['gpus']:.0f} GPUs", row["attention_kernel"]]
    if row["sequence_parallel"] is not None:
        parts.append(f"sequence parallelism {'on' if row['sequence_parallel'] else 'off'}")
    return ", ".join(filter(None, parts))


def model_error(frame: pd.DataFrame) -> str:
    """Return the model error that figures state, with errors from the middle of predicted ranges."""
    sizes = (frame["middle_ratio"].dropna().astype(float) - 1.0).abs()
    if sizes.empty:
        return "model error: not measured"
    count = f"{len(sizes):,} published iteration times, each source left out of the fit"
    return f"model error: median {100 * sizes.median():.1f}%, {(sizes <= NEAR).mean():.0%} within 10%, over {count}"


def errors_from_ends(frame: pd.DataFrame) -> str:
    """Say how wide predicted ranges are, and how large errors are from their nearest ends."""
    count, _, error, near, width = _errors(frame)
    if count == "0":
        return ""
    width = f"Rows that leave settings open have ranges (median width over all rows {width})."
    return f"{width} From the nearest end: median {error}, {near} within 10%, as below.\n"


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
the rows when the constants were fitted (2026-11). The key `constants` applies a set. `entrain-bench ledger
posterior=FILE` draws from the rows that are left.
"""


def calibration_output() -> Output:
    """The document; it needs no run."""
    details = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((config_tree() / "ledger").iterdir())]
    return Output("calibration", [], write_calibration, [NAME], files=[ERROR], details=details)


def write_calibration(study: Study) -> str:
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


def make_page(ledger: Ledger, fitted: Calibration, left_out: pd.DataFrame, book: Book, composer: Composer) -> str:
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
