"""Output of ``entrain-bench ledger``: a line for every row, and tables of errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from entrain_bench.lab.ledger.book import Book
from entrain_bench.lab.ledger.entries import Outcome
from entrain_bench.lab.ledger.summary import BY, Errors, Fits, by, of_sources, orders, reasons

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

type Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]


def frame_of(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """A line for every row: ``row`` is the line of its file.

    ``predicted_s`` and ``predicted_gib`` are the values in the predicted range that are nearest to the published ones;
    where nothing is published, the middle of the range.
    """
    return pd.DataFrame([_line(outcome) for outcome in outcomes], columns=[*COLUMNS])


def _line(outcome: Outcome) -> tuple[object, ...]:
    row = outcome.row
    seconds = outcome.seconds
    gib = outcome.gib
    published = row.published_s
    peak = row.peak_memory_gib
    return (
        row.source,
        row.line,
        published,
        None if seconds is None else seconds.nearest(published) if published else seconds.middle,
        outcome.ratio,
        peak,
        None if gib is None else gib.nearest(peak) if peak else gib.middle,
        row.outcome,
        outcome.fits,
        outcome.status,
        outcome.reason,
        seconds.low if seconds else None,
        seconds.high if seconds else None,
    )


def tables_of(outcomes: Sequence[Outcome], book: Book) -> Iterator[Table]:
    """Tables of a title, headings and rows: sources, what runs have in common, layouts, and what is left out."""
    sources = of_sources(outcomes, book)
    heading = ["source", "rows", *OF_ERRORS, "fits or not", "peak error"]
    rows = []
    for each in sources:
        peak = "" if each.peak_error is None else f"{each.peak_error:.0%}"
        rows.append([each.name, f"{each.rows:,}", *_errors(each.errors), _right(each.fits), peak])
    all_errors = Errors.of(outcomes)
    rows.append(["all", f"{len(outcomes):,}", *_errors(all_errors), _right(Fits.of(outcomes)), ""])
    yield "Sources", heading, rows
    for name, what in BY.items():
        found = by(outcomes, what)
        if len(found) > 1:
            yield f"By {name}", [name, *OF_ERRORS], [[label, *_errors(errors)] for label, errors in found]
    if ordered := orders(outcomes):
        shown = [
            [each.name, str(each.layouts), f"{each.spread:.0%}", *map(_tau, each.taus), f"{each.regret:.1%}"]
            for each in ordered
        ]
        taus = "Kendall's tau", "attainable", "other kernels"
        yield "Order of layouts", ["job", "layouts", "spread", *taus, "lost by predicted best"], shown
    if left_out := reasons(outcomes):
        yield "Rows left out", ["reason", "rows"], [[reason, str(count)] for reason, count in left_out]


def _tau(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _errors(errors: Errors | None) -> list[str]:
    if errors is None:
        return ["0", *[""] * (len(OF_ERRORS) - 1)]
    sizes = f"{errors.ratio:.3f}", f"{errors.error:.1%}", f"{errors.near:.0%}", f"{errors.width:.0%}"
    return [f"{errors.rows:,}", *sizes]


def _right(fits: Fits) -> str:
    if fits.share is None:
        return ""
    decided = fits.right + fits.wrongly_ok + fits.wrongly_oom
    return f"{fits.right} of {decided}" + (f", {fits.open} open" if fits.open else "")
