"""The forms that figures and plots share: sorted dots with a heatmap, heatmaps, lines with intervals."""

from collections.abc import Callable, Iterable, Mapping
from itertools import cycle, groupby
from typing import Any, Literal

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from entrain_bench.figures import _style as style

MARKERS = "osD^v<>phX"
# Above and below the rows of a ranking.
HEAD_IN = 0.85
LEAST_ROWS = 4
# Inches of a column of a heatmap with numbers.
COLUMN_IN = 0.28
# Labels of columns up to this number of letters are upright.
SHORT_LETTERS = 4
SLANTED: dict[str, Any] = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
# Up to this number, columns are as wide as a title; each of more has room for this number of letters.
FEW_COLUMNS = 4
LETTERS = 4
# Where the shades of times over the fastest's end.
DARKEST = 4.0


def ranking(
    overall: pd.DataFrame,
    cases: pd.DataFrame,
    texts: pd.DataFrame,
    labels: Mapping[str, str],
    colours: Mapping[str, style.Colour],
    label: str,
    start: float = 1.0,
    text: Callable[[float], str] = "{:.2f}".format,
    **shades: Any,
) -> Figure:
    """Left: ``dots`` over all cases. Right: a column a case (``heatmap``).

    ``cases`` and ``texts`` are by name; names that ``overall`` lacks come last.
    """
    order = [*overall.index, *(name for name in cases.index if name not in overall.index)]
    values = cases.loc[order].astype(float)
    several = values.shape[1] > 1 and bool(values.notna().to_numpy().any())
    widths = {"width_ratios": (1.3, COLUMN_IN * values.shape[1])} if several else {}
    width_in = style.DOUBLE_COLUMN_IN if several else style.SINGLE_COLUMN_IN
    figure, (panel, *maps) = style.panels(
        1, 1 + several, width_in, HEAD_IN + style.ROW_IN * max(len(order), LEAST_ROWS), sharey=True, **widths
    )
    for beside in maps:
        heatmap(beside, values, texts.loc[order], **shades)
        beside.tick_params(left=False, labelleft=False)
    # Last, since panels share the axis.
    dots(panel, overall, {name: labels[name] for name in order}, colours, label, start, text)
    return figure


def dots(
    panel: Axes,
    overall: pd.DataFrame,
    labels: Mapping[str, str],
    colours: Mapping[str, style.Colour],
    label: str,
    start: float = 0.0,
    text: Callable[[float], str] = "{:.2f}".format,
) -> None:
    """A dot for each name in the order of ``labels``, with its interval and number; ``start``: where lines begin.

    ``overall`` has ``mean``, ``low`` and ``high`` by name.
    """
    if overall.empty:
        style.show_reason(panel, "nothing has a result")
        return
    places = {name: place + 0.5 for place, name in enumerate(labels)}
    rows = overall.assign(name=overall.index, place=overall.index.map(places)).astype({"mean": float})
    shown = [colours[name] for name in rows.index]
    panel.hlines(rows["place"], start, rows["mean"], color=shown, linewidth=1.2)
    look: dict[str, Any] = {"palette": dict(colours), "s": 18, "linewidth": 0, "legend": False, "zorder": 3}
    sns.scatterplot(rows, x="mean", y="place", hue="name", ax=panel, **look)
    panel.hlines(rows["place"], rows["low"], rows["high"], color=style.INK, linewidth=0.7, zorder=4)
    low = min(start, float(rows["low"].min()))
    reach = max(float(rows["high"].max()) - low, 1e-9)
    for place, mean, end in rows[["place", "mean", "high"]].itertuples(index=False):
        panel.text(max(end, start) + 0.05 * reach, place, text(mean), va="center")
    panel.set(xlim=(low - 0.04 * reach, low + 1.4 * reach), ylabel="")
    panel.set_xlabel(label, loc="left")
    panel.set_yticks([*places.values()], [*labels.values()])
    panel.set_ylim(len(labels), 0)
    panel.tick_params(axis="y", length=0)


def heatmap(panel: Axes, values: pd.DataFrame, texts: pd.DataFrame | None = None, **options: Any) -> None:
    """Numbers as shades with texts; texts alone where there is none; options of seaborn's ``heatmap``.

    Without options, shades are those of times over the fastest's. Columns of two levels have the first as titles.
    """
    texts = (values.map("{:.2f}".format).where(values.notna()) if texts is None else texts).fillna("")
    titles, heads = zip(*values.columns, strict=True) if values.columns.nlevels > 1 else ((), values.columns)
    look: dict[str, Any] = {"annot": texts, "fmt": "", "cbar": False, "linewidths": 0.5}
    look |= {
        "annot_kws": {"fontsize": style.FONT_PT},
        **(options or {"norm": LogNorm(1, DARKEST), "cmap": style.WORSE}),
    }
    sns.heatmap(values.set_axis([*heads], axis="columns").astype(float), ax=panel, **look)
    panel.set(xlabel="", ylabel="")
    panel.tick_params(length=0)
    panel.tick_params(axis="y", labelrotation=0)
    for row, column in np.argwhere(values.isna().to_numpy()):
        panel.text(column + 0.5, row + 0.5, str(texts.iat[row, column]), color=style.FAINT, ha="center", va="center")
    slanted = any(len(str(head)) > SHORT_LETTERS for head in heads)
    panel.set_xticks(np.arange(len(heads)) + 0.5, heads, **(SLANTED if slanted else {"rotation": 0}))
    for _, several in groupby(enumerate(titles), key=lambda item: item[1]):
        columns = [*several]
        first, title = columns[0]
        # A narrow one has its words below each other.
        narrow = len(heads) > FEW_COLUMNS and len(str(title)) >= LETTERS * len(columns)
        words = str(title).replace(" ", "\n", 1) if narrow else title
        panel.text(first + len(columns) / 2, -0.2, words, ha="center", va="bottom")
        if first:
            panel.axvline(first, color="white", linewidth=3)


def heatmap_of(
    panel: Axes, table: pd.DataFrame, rows: Mapping[str, str], columns: Mapping[Any, str], value: str, **options: Any
) -> None:
    """A ``heatmap`` of a column of a tidy table and its column ``text``.

    ``rows`` and ``columns`` are labels by value of the first and the second of the index of the table, in their order.
    """
    wide = (
        table[name].unstack().reindex(index=[*rows], columns=[*columns]).rename(index=rows, columns=columns)
        for name in (value, "text")
    )
    values, texts = wide
    heatmap(panel, values, texts.fillna(""), **options)


def lines(
    panel: Axes,
    table: pd.DataFrame,
    x: str,
    y: str,
    by: str,
    colours: Mapping[str, style.Colour],
    labels: Mapping[str, str],
) -> None:
    """A line for each name with a color, points in the order of x, markers in the order of ``labels``.

    Where the table has ``<y>_low`` and ``<y>_high``, whiskers show that interval.
    """
    rows = table[table[by].isin([*colours])].dropna(subset=[y])
    if rows.empty:
        style.show_reason(panel, "; ".join(map(str, table.get("reason", pd.Series("no data")).unique())))
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


def handles(
    colours: Mapping[str, style.Colour], labels: Mapping[str, str], line: Literal["-", ""] = "-", marker: str = ""
) -> list[Artist]:
    """The entries of a legend: a line with its marker, or the same for all, for each name that has a color."""
    markers = dict.fromkeys(labels, marker) if marker else marker_of(labels)
    return [
        Line2D([], [], linestyle=line, color=colour, marker=markers[name], mec="white", mew=0.3, label=labels[name])
        for name, colour in colours.items()
    ]
