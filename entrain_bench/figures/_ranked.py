"""Ranked panels: horizontal bars, the best on top, with the name and the numbers of each strategy next to its bar."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from entrain_bench.answers.labels import FAMILIES, families, names
from entrain_bench.answers.statistics import Interval
from entrain_bench.answers.text import count
from entrain_bench.figures._style import (
    FAINT,
    FAMILY_COLOURS,
    INK,
    SINGLE_COLUMN_IN,
    SMALL_PT,
    TINT,
    Colour,
    legend_above,
    lighter,
    panels,
)

# The figure is as wide as a column of a paper, and all its texts are legible there.
COLUMNS = 2
# Height of a bar with its texts, of a panel's title and gap, and of texts around all panels, in inches.
ROW_IN = 0.085
TITLE_IN = 0.26
HEAD_IN = 1.0
# Lines of message and legend that this leaves room for, and the height of each further one.
HEAD_LINES = 4
LINE_IN = 0.12
# Where columns of numbers end, right of the bars, in points, and the share of its row that a bar fills.
NUMBER_ENDS_PT = (16.5, 46.5, 60.5)
BAR = 0.82
LEGEND_PT = 6.0
# From here half widths are whole percents, and numbers whole.
WHOLE = 0.95
MANY = 999.5
# Percents: two seeds can have intervals that are wider than all there is room for.
WIDEST = 99


@dataclass(frozen=True, slots=True)
class Row:
    """A strategy in a panel.

    Attributes:
        name: text left of the bar.
        colour: that of the bar.
        value: length of the bar; None without a result.
        texts: texts right of the bar, one for each column of the panel.
        bold: whether name and texts are bold.
    """

    name: str
    colour: Colour
    value: float | None
    texts: Sequence[str]
    bold: bool = False


def ranked_panels(num_panels: int, num_rows: int) -> tuple[Figure, list[Axes]]:
    """Return a figure with ``num_panels`` panels, each with room for ``num_rows`` rows."""
    columns = min(COLUMNS, num_panels)
    deep = -(-num_panels // columns)
    figure, axes = panels(deep, columns, SINGLE_COLUMN_IN, HEAD_IN + deep * (TITLE_IN + ROW_IN * num_rows))
    # Names need all the width there is.
    figure.set_layout_engine("constrained", w_pad=0.02, wspace=0.01)
    for panel in axes[num_panels:]:
        panel.set_visible(False)
    return figure, axes[:num_panels]


def make_room(figure: Figure) -> None:
    """Make a figure higher if its message and legend have more lines than ``HEAD_IN`` has room for."""
    heads = [legend.get_title().get_text().count("\n") + 1 + len(legend.get_texts()) for legend in figure.legends]
    lines = max(heads, default=0)
    figure.set_figheight(figure.get_figheight() + max(0, lines - HEAD_LINES) * LINE_IN)


def draw_ranked(panel: Axes, title: str, headings: Sequence[str], rows: Sequence[Row]) -> None:
    """Draw bars from top to bottom in the given order, with ``headings`` above the columns of texts."""
    ends = [0.0, *(row.value for row in rows if row.value is not None)]
    panel.set_xlim(min(ends), max(ends) or 1.0)

    def write(text: str, y: float, end_pt: float, **look: Any) -> None:
        where: Any = {"xycoords": panel.get_yaxis_transform(), "textcoords": "offset points", "annotation_clip": False}
        panel.annotate(text, (1.0, y), (end_pt, 0.0), ha="right", va="center", size=SMALL_PT, **where, **look)

    for end_pt, heading in zip(NUMBER_ENDS_PT, headings, strict=False):
        write(heading, -1.0, end_pt, color=FAINT)
    for y, row in enumerate(rows):
        weight = "bold" if row.bold else "normal"
        for end_pt, text in zip(NUMBER_ENDS_PT, row.texts, strict=False):
            write(text, y, end_pt, color=INK if row.value is not None else FAINT, weight=weight)
        look: Any = {"va": "center", "size": SMALL_PT, "weight": weight, "zorder": 5}
        panel.annotate(row.name, (0.0, y), (2.0, 0.0), textcoords="offset points", **look)
        if row.value is None:
            continue
        panel.barh(y, row.value, BAR, color=lighter(row.colour, TINT), zorder=2)
        panel.vlines(0.0, y - BAR / 2, y + BAR / 2, color=row.colour, linewidth=2.0, zorder=2)
    panel.set_title(title, loc="left", weight="bold", size=SMALL_PT + 0.5)
    panel.set_ylim(len(rows) - 0.4, -1.4)
    panel.set_axis_off()


def ranked_legend(figure: Figure, handles: Sequence[Artist]) -> None:
    """Draw the legend above ranked panels, in a size between those of the panels and the message."""
    legend_above(figure, handles, size_pt=LEGEND_PT)


def change(relative: Interval | None) -> str:
    """A ratio as a change with half the width of its interval: ``+12 ±3%``; without an interval ``+12%``."""
    if relative is None:
        return ""
    text = f"{100 * (relative.mean - 1):+.0f}".replace("-0", "+0")
    half = 100 * relative.margin
    width = f">{WIDEST}" if half > WIDEST else f"{half:.{0 if half >= WHOLE else 1}f}"
    return f"{text} ±{width}%" if relative.num_values > 1 else f"{text}%"


def number(value: float) -> str:
    """Three digits: ``6.00``, ``53.5``, ``131``, ``1234``."""
    return f"{value:#.3g}".rstrip(".") if abs(value) < MANY else f"{value:.0f}"


def family_colours(data: pd.DataFrame) -> dict[str, Colour]:
    """The color of every strategy's family."""
    return {name: FAMILY_COLOURS[family] for name, family in families(data).items()}


def family_handles(data: pd.DataFrame) -> list[Artist]:
    """A patch for each family that a table has, if there are several."""
    present = {*families(data).values()}
    if len(present) < 2:
        return []
    return [Patch(facecolor=FAMILY_COLOURS[family], label=FAMILIES[family]) for family in FAMILIES if family in present]


def starred(label: str, row: Mapping[Any, Any]) -> str:
    """A strategy's label, with a star if some of its seeds have no result."""
    return f"{label}*" if 0 < row["num_ok"] < row["num_runs"] else label


def starred_handles(table: pd.DataFrame) -> list[Artist]:
    """Return a legend entry for the star, if a table needs it."""
    needed = table["num_ok"].between(1, table["num_runs"] - 1).any()
    return [Line2D([], [], linestyle="", label="*: some seeds have no result")] if needed else []


def counted(winners: Sequence[str], labels: Mapping[str, str]) -> str:
    """How often each name wins, most often first: ``Braid 7, DIP 2``."""
    often = sorted(dict.fromkeys(winners), key=lambda name: -winners.count(name))
    return ", ".join(f"{labels.get(name, name)} {winners.count(name)}" for name in often)


def draw_metric(
    data: pd.DataFrame,
    table: pd.DataFrame,
    metric: str,
    headings: Sequence[str],
    texts: Callable[[pd.Series], Sequence[str]],
    descending: bool = False,
) -> Figure:
    """A panel for each model and trace: its rows of a table by one metric, those without result last.

    Args:
        data: runs, for labels and families.
        table: a row for every model, workload and strategy, with ``num_runs``, ``num_ok`` and ``status``.
        metric: the column of the bars' lengths.
        headings: what stands above each column of texts.
        texts: the texts of a row of the table, one for each heading.
        descending: whether the greatest value is on top.
    """
    labels, traces, models = (names(data, column) for column in ("strategy", "workload", "model"))
    colours = family_colours(data)
    # A row a trace, a column a model.
    jobs = [(model, trace) for trace in traces for model in models]
    figure, axes = ranked_panels(len(jobs), len(labels))
    for panel, (model, trace) in zip(axes, jobs, strict=True):
        mine = table[(table["model"] == model) & (table["workload"] == trace)]
        rows = []
        for _, row in mine.sort_values(metric, ascending=not descending, kind="stable").iterrows():
            name = row["strategy"]
            there = pd.notna(row[metric])
            said = texts(row) if there else [row["status"]]
            rows.append(Row(starred(labels[name], row.to_dict()), colours[name], row[metric] if there else None, said))
        draw_ranked(panel, f"{traces[trace]}, {models[model]}", headings, rows)
    ranked_legend(figure, [*family_handles(data), *starred_handles(table)])
    return figure


def range_of(data: pd.DataFrame, table: pd.DataFrame, metric: str, form: str) -> str:
    """Means of a metric over all jobs, least and greatest: ``25% (DIP) to 60% (Megatron), mean over 3 jobs``."""
    labels = names(data, "strategy")
    jobs = table[["model", "workload"]].drop_duplicates()
    # Strategies that lack a job would be compared on other jobs.
    found = table.groupby("strategy", sort=False)[metric].agg(["mean", "count"])
    means = found["mean"][found["count"] == len(jobs)]
    if means.empty:
        return "no strategy has a result on every job"
    ordered = [*means.sort_values(kind="stable").items()]
    ends = [f"{form.format(value)} ({labels[str(name)]})" for name, value in (ordered[0], ordered[-1])]
    return f"{' to '.join(ends)}, mean over {count(len(jobs), 'job')}"
