"""Forms that several figures share: a ranking with a heatmap of jobs, a heatmap with texts, and lines over a number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any, Literal

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from entrain_bench.answers.labels import names
from entrain_bench.figures._style import (
    DOUBLE_COLUMN_IN,
    FAINT,
    INK,
    MARKERS,
    MAX_HEIGHT_IN,
    SINGLE_COLUMN_IN,
    Colour,
    family_colours,
    family_handles,
    legend_above,
    panels,
    show_reason,
)
from entrain_bench.figures._tables import JOB, starred

# Height of a strategy in a ranking, and of what is above and below.
ROW_IN = 0.165
HEAD_IN = 0.85
SHADE = "#d55e00"
# Labels of columns up to so many letters stand upright.
SHORT_LETTERS = 4


def ranking(
    overall: pd.DataFrame,
    jobs: pd.DataFrame,
    labels: Mapping[str, str],
    colours: Mapping[str, Colour],
    handles: Sequence[Artist],
    label: str,
    form: str = "{:.2f}",
    norm: Normalize | None = None,
    start: float = 0.0,
) -> Figure:
    """Left: strategies from best to worst over all jobs. Right: every job, a column each.

    Args:
        overall: ``mean``, and ``low`` and ``high`` if known, by strategy in the order of the rows; others come last.
        jobs: values by strategy; columns are (group, job), as people say them.
        labels: of the strategies.
        colours: of the dots.
        handles: legend of the colours.
        label: of the axis of ``overall``.
        form: format of a value.
        norm: of the shades.
        start: value at which lines begin.
    """
    order = [*overall.index, *(name for name in jobs.index if name not in overall.index)]
    values = jobs.loc[order].astype(float)
    several = values.shape[1] > 1
    widths = {"width_ratios": (1.0, 0.25 * values.shape[1])} if several else {}
    width_in = DOUBLE_COLUMN_IN if several else SINGLE_COLUMN_IN
    height_in = min(MAX_HEIGHT_IN, HEAD_IN + ROW_IN * len(order))
    figure, (dots, *maps) = panels(1, 1 + several, width_in, height_in, sharey=True, **widths)
    for panel in maps:
        shades = values.set_axis(values.columns.get_level_values(1), axis=1)
        texts = shades.map(lambda value: "" if pd.isna(value) else form.format(value))
        heatmap(panel, shades, texts, norm=norm, cmap=sns.light_palette(SHADE, as_cmap=True))
        panel.tick_params(left=False, labelleft=False)
        _name_groups(panel, [*values.columns.get_level_values(0)])
    legend_above(figure, handles)
    if overall.empty:
        show_reason(dots, "no strategy has a result on every job")
        return figure
    places = np.arange(len(overall)) + 0.5
    shown = [colours[name] for name in overall.index]
    dots.hlines(places, start, overall["mean"], color=shown, linewidth=1.2)
    dots.scatter(overall["mean"], places, c=shown, s=14, zorder=3)
    ends = overall["mean"]
    if "high" in overall:
        dots.hlines(places, overall["low"], overall["high"], color=INK, linewidth=0.7, zorder=4)
        ends = overall["high"]
    reach = float(max(ends.max() - start, 1e-9))
    for place, mean, end in zip(places, overall["mean"], ends, strict=True):
        dots.text(max(end, start) + 0.05 * reach, place, form.format(mean), va="center")
    dots.set_xlim(min(start, float(overall["mean"].min())) - 0.04 * reach, start + 1.35 * reach)
    dots.set_xlabel(f"{label}{', mean' if several else ''}")
    # Last, since panels share the axis.
    dots.set_yticks(np.arange(len(order)) + 0.5, [labels[name] for name in order])
    dots.set_ylim(len(order), 0)
    dots.tick_params(axis="y", length=0)
    return figure


def ranking_by(
    data: pd.DataFrame, table: pd.DataFrame, metric: str, label: str, form: str, descending: bool = False
) -> Figure:
    """A ``ranking`` by the mean of one metric of a table of runs by model, trace and strategy (``over_seeds``)."""
    wide, shown = by_job(data, table, metric)
    overall = wide.mean(axis="columns", skipna=False).dropna().sort_values(ascending=not descending, kind="stable")
    handles = family_handles(data)
    return ranking(overall.to_frame("mean"), wide, shown, family_colours(data), handles, label, form)


def by_job(data: pd.DataFrame, table: pd.DataFrame, metric: str) -> tuple[pd.DataFrame, dict[str, str]]:
    """A metric by strategy, a column a job (model and trace as people say them), and labels of the strategies."""
    labels, traces, models = (names(data, column) for column in ("strategy", "workload", "model"))
    wide = table.astype({metric: float}).pivot_table(metric, "strategy", JOB, dropna=False)
    wide = wide[[(model, trace) for model in models for trace in traces if (model, trace) in wide]]
    wide.columns = pd.MultiIndex.from_tuples([(models[job[0]], traces[job[1]]) for job in wide.columns])
    runs = table.groupby("strategy")[["num_ok", "num_runs"]].sum()
    return wide, {name: starred(labels[name], runs.loc[name]) for name in wide.index}


def _name_groups(panel: Axes, groups: Sequence[str]) -> None:
    """Names of groups of columns above a heatmap, and a gap between groups."""
    for group in dict.fromkeys(groups):
        first = groups.index(group)
        panel.text(first + groups.count(group) / 2, -0.25, group, ha="center", va="bottom")
        if first:
            panel.axvline(first, color="white", linewidth=3)


def heatmap(panel: Axes, values: pd.DataFrame, texts: pd.DataFrame, **options: Any) -> None:
    """Numbers as shades with texts; texts alone where there is none; options of seaborn's ``heatmap``."""
    look = {"annot": texts, "fmt": "", "cbar": False, "linewidths": 0.5, "annot_kws": {"fontsize": 6.5}}
    sns.heatmap(values.astype(float), ax=panel, **look, **options)
    panel.set(xlabel="", ylabel="")
    panel.tick_params(length=0)
    panel.tick_params(axis="y", labelrotation=0)
    for row, column in np.argwhere(values.isna().to_numpy()):
        panel.text(column + 0.5, row + 0.5, str(texts.iat[row, column]), color=FAINT, ha="center", va="center")
    labels = panel.get_xticklabels()
    if any(len(label.get_text()) > SHORT_LETTERS for label in labels):
        for label in labels:
            label.set(rotation=30, ha="right", rotation_mode="anchor")


def draw_lines(
    panel: Axes, table: pd.DataFrame, x: str, y: str, by: str, colours: Mapping[str, Colour], labels: Mapping[str, str]
) -> None:
    """A line for each name with a colour, points in the order of x, markers in the order of ``labels``.

    Where the table has ``<y>_low`` and ``<y>_high``, whiskers show that interval.
    """
    rows = table[table[by].isin([*colours])].dropna(subset=[y])
    if rows.empty:
        show_reason(panel, "; ".join(table["reason"].unique()) or "no data")
        return
    look: dict[str, Any] = {"hue_order": [*colours], "palette": dict(colours), "markers": marker_of(labels)}
    look |= {"dashes": False, "errorbar": None, "legend": False, "mec": "white", "mew": 0.3}
    sns.lineplot(rows.astype({y: float}), x=x, y=y, hue=by, style=by, ax=panel, **look)
    if f"{y}_low" in rows:
        panel.vlines(rows[x], rows[f"{y}_low"], rows[f"{y}_high"], color=[*rows[by].map(colours)], linewidth=0.7)
    panel.set(xlabel="", ylabel="")


def marker_of[Name](names: Iterable[Name]) -> dict[Name, str]:
    """A marker for each name, by order of appearance."""
    return dict(zip(names, cycle(MARKERS), strict=False))


def line_handles(
    colours: Mapping[str, Colour], labels: Mapping[str, str], line: Literal["-", ""] = "-"
) -> list[Artist]:
    """A line with its marker for each name that has a colour."""
    markers = marker_of(labels)
    return [
        Line2D([], [], linestyle=line, color=colour, marker=markers[name], mec="white", mew=0.3, label=labels[name])
        for name, colour in colours.items()
    ]
