"""The picture of an answer: a sweep at a glance, as a PNG with the same bytes for the same data."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.labels import OURS
from entrain_bench.figures._style import (
    FAMILY_COLOURS,
    ranking,
    small_png,
)
from entrain_bench.figures.iteration_time import DARKEST

# More cases are not readable; the table has them all.
MAX_CASES = 12


def standings_png(answer: Answer) -> bytes:
    """Draw ``draw_standings``."""
    return small_png(lambda: draw_standings(answer))


def draw_standings(answer: Answer) -> Figure:
    """A row a strategy or variant, the fastest on top, a column a case; a star marks those that lack seeds."""
    cases = answer.cases[:MAX_CASES]
    rows = [(answer.case_name(case), row) for case in cases for row in case.results]
    times = [(case, row.name, row.standing.time.mean if row.standing.time else None) for case, row in rows]
    table = pd.DataFrame(times, columns=["case", "name", "seconds"]).astype({"seconds": float})
    wide = table.pivot_table("seconds", "name", "case", sort=False, dropna=False)
    relative = wide / wide.min()
    overall = relative.mean(axis="columns", skipna=False).dropna().to_frame("mean")
    if len(cases) == 1:
        behind = {row.name: row.standing.behind for _, row in rows if row.standing.behind}
        overall["low"] = [behind[name].low if name in behind else 1.0 for name in overall.index]
        overall["high"] = [behind[name].high if name in behind else 1.0 for name in overall.index]
    relative.columns = pd.MultiIndex.from_tuples([("", name) for name in relative.columns])
    lacking = {row.name for _, row in rows if None in row.standing.times.values()}
    labels = {name: f"{name}*" if name in lacking else name for name in relative.index}
    colours = {row.name: FAMILY_COLOURS[OURS if row.family == OURS else "published"] for _, row in rows}
    look: dict[str, Any] = {"label": "time / fastest", "norm": LogNorm(1, DARKEST), "start": 1.0}
    figure = ranking(overall.sort_values("mean", kind="stable"), relative, labels, colours, [], **look)
    if len(cases) < len(answer.cases):
        figure.supxlabel(f"{len(cases)} of {len(answer.cases)} cases; table.csv has all")
    return figure
