"""The look that figures share: seaborn's theme, colours, sizes; rankings, heatmaps, lines, panels without data."""

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from itertools import cycle
from threading import RLock
from typing import Any, Literal, NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.labels import OURS, families, orders

mpl.use("Agg")

_DRAWING = RLock()
SINGLE_COLUMN_IN = 3.35
DOUBLE_COLUMN_IN = 7.0
MAX_HEIGHT_IN = 4.5
FONT_PT = 7.0
SMALL_DPI = 130
GRID, INK, FAINT = "#d9d9d9", "#262626", "#8c8c8c"
THEME: Any = {
    "context": "paper",
    "style": "ticks",
    "font": "DejaVu Sans",
    "rc": {
        **dict.fromkeys(("font.size", "axes.labelsize", "xtick.labelsize", "ytick.labelsize"), FONT_PT),
        **dict.fromkeys(("legend.fontsize", "legend.title_fontsize", "figure.labelsize"), FONT_PT),
        "axes.titlesize": FONT_PT + 0.5,
        **dict.fromkeys(("axes.linewidth", "xtick.major.width", "ytick.major.width"), 0.6),
        **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 2.5),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
        "axes.edgecolor": INK,
        "grid.color": GRID,
        "grid.linewidth": 0.4,
        "lines.linewidth": 1.0,
        "lines.markersize": 3.5,
        "pdf.fonttype": 42,
        "savefig.dpi": 200,
        "figure.dpi": 200,
        "svg.hashsalt": "entrain-bench",
    },
}

type Colour = tuple[float, float, float]

MARKERS = "osD^v<>phX"
COLOURBLIND: list[Colour] = [*sns.color_palette("colorblind")]
# Colours of compared systems by display order, the last for one without. Every two, and our own
# orange, differ by a CIEDE2000 of at least 15, also as seen with deuteranopia.
_SYSTEM_HEX = ["#8c8c8c", "#0173b2", "#005555", "#aa1555", "#8095ff", "#aa5515", "#eabfff", "#402a00", "#2a1580"]
SYSTEM_COLOURS: list[Colour] = [*map(to_rgb, [*_SYSTEM_HEX, "#ffeaaa"])]
NUM_ORDERED = len(SYSTEM_COLOURS) - 1
# By ``strategy.family``.
_FAMILY_HEX = {"published": "#0173b2", "out_of_the_box": "#8f8f8f", "simple": "#005555", OURS: "#de8f05", "": "#402a00"}
FAMILY_COLOURS: dict[str, Colour] = {family: to_rgb(colour) for family, colour in _FAMILY_HEX.items()}


class Picture(NamedTuple):
    """A figure, the table of what it shows, and its message: a sentence for the caption, empty for none."""

    figure: Figure
    table: pd.DataFrame
    message: str = ""


@contextmanager
def styled() -> Iterator[None]:
    """Draw in the suite's style, one thread at a time: settings and layouts of matplotlib belong to all of them."""
    with _DRAWING, mpl.rc_context():
        sns.set_theme(**THEME)
        yield


def panels(rows: int, columns: int, width_in: float, height_in: float, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure with a grid of panels, row by row; panels are placed so that no text overlaps."""
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, list(axes.flat)


def palette(names: Iterable[str]) -> dict[str, Colour]:
    """A colour-blind-safe colour for each name, by order of appearance."""
    return dict(zip(names, cycle(COLOURBLIND), strict=False))


def system_colours(data: pd.DataFrame) -> dict[str, Colour]:
    """The colour of every strategy of a run table, the same in every figure: ours orange, others by display order."""
    family = families(data)
    return strategy_colours(orders(data), {name for name in family if family[name] == OURS})


def strategy_colours(display_orders: Mapping[str, int | None], ours: Iterable[str] = ()) -> dict[str, Colour]:
    """Colours by display order; strategies without one take theirs from the other end."""
    unordered = (-1 - place for place in range(len(display_orders)))
    colours = dict[str, Colour]()
    for name, order in display_orders.items():
        place = next(unordered) if order is None else order
        colour = SYSTEM_COLOURS[place % NUM_ORDERED if place >= 0 else max(place, -NUM_ORDERED)]
        # Once all are taken, lighter ones follow.
        colours[name] = lighter(colour) if place >= NUM_ORDERED else colour
    return colours | dict.fromkeys(ours, FAMILY_COLOURS[OURS])


def lighter(colour: Colour, share: float = 0.55) -> Colour:
    """The colour mixed with white."""
    red, green, blue = (1.0 - (1.0 - part) * (1.0 - share) for part in colour)
    return red, green, blue


def darker(colour: Colour, share: float = 0.6) -> Colour:
    """The colour mixed with black."""
    red, green, blue = (part * share for part in colour)
    return red, green, blue


def legend_above(figure: Figure, handles: Sequence[Artist], columns: int = 6) -> None:
    """Draw one legend for the figure above all panels."""
    if handles:
        columns = min(columns, len(handles))
        figure.legend(handles=list(handles), loc="outside upper center", ncols=columns, handletextpad=0.4)


def tick_number(value: float, _: object = None) -> str:
    """A tick label: 500, 2k, 16k, 1M; 0.5 stays 0.5."""
    for limit, suffix in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:g}{suffix}"
    return f"{value:g}"


NUMBER_FORMAT = FuncFormatter(tick_number)


def show_reason(axes: Axes, reason: str) -> None:
    """An empty panel that says why."""
    axes.set(xticks=[], yticks=[], facecolor="#f5f5f5")
    text = textwrap.fill(" ".join(reason.split()), 24, max_lines=8, placeholder=" ...")
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=INK)


def empty_figure(reason: str) -> Picture:
    """Return a figure that states why there is no data, and the reason as a table."""
    figure, (axes,) = panels(1, 1, SINGLE_COLUMN_IN, 1.5)
    show_reason(axes, f"no data: {reason}")
    return Picture(figure, pd.DataFrame({"reason": [reason]}))


# Stated in docs/calibration.md, whose generation checks it.
MODEL_ERROR = (
    "model error: median 3.7%, 75% within 10%, over 1,118 published iteration times, each source left out of the fit"
)


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
    label: str,
    form: str = "{:.2f}",
    norm: Normalize | None = None,
    start: float = 0.0,
) -> Figure:
    """Left: strategies from best to worst over all jobs. Right: every job, a column each.

    ``overall`` has ``mean``, and ``low`` and ``high`` if known, by strategy in the order of the rows; others come last.
    ``jobs`` has values by strategy; columns are jobs, as people say them. Lines of the dots begin at ``start``;
    ``label`` is of their axis, ``norm`` of the shades.
    """
    order = [*overall.index, *(name for name in jobs.index if name not in overall.index)]
    values = jobs.loc[order].astype(float)
    several = values.shape[1] > 1
    widths = {"width_ratios": (1.0, 0.25 * values.shape[1])} if several else {}
    width_in = DOUBLE_COLUMN_IN if several else SINGLE_COLUMN_IN
    height_in = min(MAX_HEIGHT_IN, HEAD_IN + ROW_IN * len(order))
    figure, (dots, *maps) = panels(1, 1 + several, width_in, height_in, sharey=True, **widths)
    for panel in maps:
        texts = values.map(lambda value: "" if pd.isna(value) else form.format(value))
        heatmap(panel, values, texts, norm=norm, cmap=sns.light_palette(SHADE, as_cmap=True))
        panel.tick_params(left=False, labelleft=False)
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


def heatmap_of(
    panel: Axes, table: pd.DataFrame, rows: Mapping[str, str], columns: Mapping[str, str], value: str, **options: Any
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


def speedup_shades(extreme: float) -> dict[str, Any]:
    """Options of a heatmap of speedups: colours end at ``extreme``, further speedups look alike."""
    return {"norm": LogNorm(1 / extreme, extreme), "cmap": "vlag_r"}


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


# Where the shades of times over the fastest's end.
DARKEST = 4.0
# More cases are not readable; the table has them all.
MAX_CASES = 12


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
    lacking = {row.name for _, row in rows if None in row.standing.times.values()}
    labels = {name: f"{name}*" if name in lacking else name for name in relative.index}
    colours = {row.name: FAMILY_COLOURS[OURS if row.family == OURS else "published"] for _, row in rows}
    look: dict[str, Any] = {"label": "time / fastest", "norm": LogNorm(1, DARKEST), "start": 1.0}
    figure = ranking(overall.sort_values("mean", kind="stable"), relative, labels, colours, **look)
    if len(cases) < len(answer.cases):
        figure.supxlabel(f"{len(cases)} of {len(answer.cases)} cases; table.csv has all")
    return figure


def standings_png(answer: Answer) -> bytes:
    """Return ``draw_standings`` as a small PNG: the same bytes for the same data."""
    file = BytesIO()
    with styled():
        draw_standings(answer).savefig(file, format="png", dpi=SMALL_DPI, metadata={"Software": None})
    return file.getvalue()
