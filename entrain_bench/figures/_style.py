"""The look that all figures share: sizes, fonts, colours, grids, legends, missing data, the model's error."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from itertools import cycle, product
from threading import RLock
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure, SubFigure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

mpl.use("Agg")

_DRAWING = RLock()
SINGLE_COLUMN_IN = 3.35
DOUBLE_COLUMN_IN = 7.0
FONT_PT = 7.0
MESSAGE_PT = 8.0
# Of figures that have many names in one column's width.
SMALL_PT = 5.0
SMALL_DPI = 130
# Upper estimates of what a legend's symbol with its gaps and a letter take.
ENTRY_IN = 0.36
LETTER_IN = 0.055
MESSAGE_LETTER_IN = 0.071
GRID, INK, FAINT = "#d9d9d9", "#262626", "#8c8c8c"
TICKS = {"labelsize": FONT_PT, "major.width": 0.6, "major.size": 2.5, "minor.size": 0.0, "major.pad": 2.0}
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": FONT_PT,
    "axes.titlesize": FONT_PT + 0.5,
    "axes.titlepad": 3.0,
    "axes.labelsize": FONT_PT,
    "axes.labelpad": 2.0,
    "axes.linewidth": 0.6,
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.4,
    **{f"{axis}tick.{name}": value for axis in "xy" for name, value in TICKS.items()},
    "lines.linewidth": 1.0,
    "hatch.linewidth": 0.5,
    "legend.fontsize": FONT_PT,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "legend.columnspacing": 1.2,
    "figure.constrained_layout.h_pad": 0.03,
    "figure.constrained_layout.w_pad": 0.03,
    "savefig.dpi": 200,
    "figure.dpi": 200,
    "pdf.fonttype": 42,
    "svg.hashsalt": "entrain-bench",
}

MARKERS = "osD^vPX*<>"

type Colour = tuple[float, float, float]


# Seaborn's colour-blind-safe palette: blue, orange, green, red, purple, brown, pink, grey, yellow, sky blue. As values:
# importing seaborn takes longer than all else that a picture of a sweep needs.
_HEX = ["#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc", "#ca9161", "#fbafe4", "#949494", "#ece133", "#56b4e9"]
COLOURBLIND: list[Colour] = [*map(to_rgb, _HEX)]
# Of strategies by display order, the last for one without. Every two differ by a CIEDE2000 of at least 15, also as seen
# with deuteranopia (tests/figures/test_colours.py). Figures of more strategies write the name at each mark.
_STRATEGY_HEX = ["#8c8c8c", "#0173b2", "#de8f05", "#005555", "#aa1555", "#8095ff", "#aa5515", "#eabfff", "#402a00"]
STRATEGY_COLOURS: list[Colour] = [*map(to_rgb, [*_STRATEGY_HEX, "#2a1580", "#ffeaaa"])]
NUM_ORDERED = len(STRATEGY_COLOURS) - 1
# By ``strategy.family``; bars behind texts are lighter by ``TINT``, in which they differ as much.
_FAMILY_HEX = {"out_of_the_box": "#7a7a7a", "published": "#0173b2", "ours": "#de8f05", "": "#402a00"}
FAMILY_COLOURS: dict[str, Colour] = {family: to_rgb(colour) for family, colour in _FAMILY_HEX.items()}
TINT = 0.45


def palette(names: Iterable[str]) -> dict[str, Colour]:
    """A colour-blind-safe colour for each name, by order of appearance."""
    return dict(zip(names, cycle(COLOURBLIND), strict=False))


def strategy_colours(orders: Mapping[str, int | None]) -> dict[str, Colour]:
    """The same colour for a strategy in every figure: by its display order, from the other end if it has none."""
    unknown = [name for name, order in orders.items() if order is None]
    colours = {}
    for name, order in orders.items():
        place = -1 - unknown.index(name) if order is None else order
        colour = STRATEGY_COLOURS[place % NUM_ORDERED if place >= 0 else place]
        # Once all are taken, lighter ones follow, then darker ones.
        shade = place // NUM_ORDERED % 3 if place >= 0 else 0
        colours[name] = (colour, lighter(colour), darker(colour))[shade]
    return colours


def marker_of(names: Iterable[str]) -> dict[str, str]:
    """A marker for each name, by order of appearance."""
    return dict(zip(names, cycle(MARKERS), strict=False))


def lighter(colour: Colour, share: float = 0.55) -> Colour:
    """The colour mixed with white."""
    red, green, blue = (1.0 - (1.0 - part) * (1.0 - share) for part in colour)
    return red, green, blue


def darker(colour: Colour, share: float = 0.6) -> Colour:
    """The colour mixed with black."""
    red, green, blue = (part * share for part in colour)
    return red, green, blue


def is_dark(colour: Sequence[float]) -> bool:
    """Return whether white text has a higher contrast than ``INK`` on a color (WCAG 2.2, relative luminance)."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in (*to_rgb(INK), *colour)]
    ink, ground = (0.2126 * red + 0.7152 * green + 0.0722 * blue for red, green, blue in (linear[:3], linear[3:6]))
    return 1.05 / (ground + 0.05) > (ground + 0.05) / (ink + 0.05)


def panels(rows: int, columns: int, width_in: float, height_in: float, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure with a grid of panels, row by row; panels are placed so that no text overlaps."""
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, list(axes.flat)


def facets[Row, Column](
    rows: Sequence[Row], columns: Sequence[Column], height_in: float, **options: Any
) -> tuple[Figure, list[tuple[Row, Column, Axes]]]:
    """A figure of two columns' width, and its panels: one for every row and column."""
    figure, axes = panels(len(rows), len(columns), DOUBLE_COLUMN_IN, height_in, **options)
    return figure, [(*place, panel) for place, panel in zip(product(rows, columns), axes, strict=True)]


def show_grid(panel: Axes, columns: Sequence[str], rows: Sequence[str], **options: Any) -> None:
    """Axes of a table: a cell of size 1 for every column and row, the first row on top; options of column labels."""
    panel.set_xticks(range(len(columns)), columns, **options)
    panel.set_yticks(range(len(rows)), rows)
    panel.set_xlim(-0.5, len(columns) - 0.5)
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.tick_params(length=0)
    panel.grid(visible=False)
    panel.spines[["left", "bottom"]].set_visible(False)


@contextmanager
def styled() -> Iterator[None]:
    """Draw in the suite's style, one thread at a time: settings and layouts of matplotlib belong to all of them."""
    with _DRAWING, mpl.rc_context(STYLE):
        yield


def small_png(draw: Callable[[], Figure]) -> bytes:
    """A figure for a page of many: the same bytes for the same data."""
    file = BytesIO()
    with styled():
        draw().savefig(file, format="png", dpi=SMALL_DPI, metadata={"Software": None})
    return file.getvalue()


def split(figure: Figure, widths: Sequence[float] = (1.0,), heights: Sequence[float] = (1.0,)) -> list[SubFigure]:
    """Parts of a figure that lay out their panels apart, row by row.

    They have no background of their own: the layout's solver gives its corner now as 0 and now as -0, and the files of
    the same data would differ.
    """
    grid = figure.add_gridspec(len(heights), len(widths), width_ratios=widths, height_ratios=heights)
    places = [grid[row, column] for row in range(len(heights)) for column in range(len(widths))]
    return [figure.add_subfigure(place, frameon=False) for place in places]


def say(figure: Figure, message: str, size_pt: float = MESSAGE_PT) -> None:
    """Write the figure's message above its legend, or above its panels if it has none."""
    letter_in = MESSAGE_LETTER_IN * size_pt / MESSAGE_PT
    text = "\n".join(textwrap.wrap(" ".join(message.split()), int(figure.get_figwidth() / letter_in)))
    if figure.legends:
        (legend, *_) = figure.legends
        legend.set_title(text, FontProperties(size=size_pt, weight="bold"))
    else:
        figure.suptitle(text, fontsize=size_pt, weight="bold")


def message_of(figure: Figure) -> str:
    """The figure's message in one line; empty without one."""
    text = figure.legends[0].get_title().get_text() if figure.legends else figure.get_suptitle()
    return " ".join(text.split())


def legend_above(
    figure: Figure, handles: Sequence[Artist], columns: int | None = None, size_pt: float = FONT_PT
) -> None:
    """Draw one legend for the figure above all panels, in the fewest rows that fit its width."""
    if not handles:
        return
    width_in = figure.get_figwidth() * FONT_PT / size_pt
    columns = columns or _fitting_columns([str(handle.get_label()) for handle in handles], width_in)
    for earlier in [*figure.legends]:
        earlier.remove()
    figure.legend(handles=list(handles), loc="outside upper center", ncols=columns, fontsize=size_pt)


def _fitting_columns(labels: Sequence[str], width_in: float) -> int:
    """Columns of a legend in as few rows as a width allows; entries run down its columns."""
    for rows in range(1, len(labels) + 1):
        columns = [labels[first : first + rows] for first in range(0, len(labels), rows)]
        if sum(ENTRY_IN + LETTER_IN * max(map(len, column)) for column in columns) <= width_in:
            return len(columns)
    return 1


def strategy_handles(colours: dict[str, Colour], labels: dict[str, str]) -> list[Artist]:
    """A coloured patch for each strategy."""
    return [Patch(facecolor=colour, label=labels[name]) for name, colour in colours.items()]


def tick_number(value: float, _: object = None) -> str:
    """A tick label: 500, 2k, 16k, 1M; 0.5 stays 0.5."""
    for limit, suffix in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:g}{suffix}"
    return f"{value:g}"


NUMBER_FORMAT = FuncFormatter(tick_number)


def show_reason(axes: Axes, reason: str) -> None:
    """An empty panel that says why."""
    axes.grid(visible=False)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_facecolor("#f5f5f5")
    axes.text(0.5, 0.5, _wrap(reason, 24), transform=axes.transAxes, ha="center", va="center", color=INK, wrap=True)


def empty_figure(reason: str) -> tuple[Figure, pd.DataFrame]:
    """Return a figure that states why there is no data, and the reason as a table."""
    figure, (axes,) = panels(1, 1, SINGLE_COLUMN_IN, 1.5)
    show_reason(axes, "")
    axes.texts[0].set_text(_wrap(f"no data: {reason}", 56))
    return figure, pd.DataFrame({"reason": [reason]})


def _wrap(text: str, width: int, max_lines: int = 8) -> str:
    lines = textwrap.wrap(" ".join(text.split()), width)
    return "\n".join(lines[:max_lines]) + (" ..." if len(lines) > max_lines else "")


# Of figures that show times, none is measured but these.
MEASURED = frozenset({"measured_gantt"})
UNITS = ("(s)", "(ms)")
# Of docs/calibration.md, whose generation checks it.
MODEL_ERROR = (
    "model error: median 6.1%, 77% within 10%, over 317 published iteration times, each source left out of the fit"
)


def state_model_error(figure: Figure) -> None:
    """Put the model error below a figure with an axis in seconds."""
    lowest = figure.subfigs[-1] if figure.subfigs else figure
    labels = [axes.get_xlabel() + axes.get_ylabel() for axes in figure.findobj(Axes)] + [lowest.get_supxlabel()]
    if any(unit in label for label in labels for unit in UNITS):
        width = int(figure.get_figwidth() / LETTER_IN)
        stated = (textwrap.fill(each, width) for each in (lowest.get_supxlabel(), MODEL_ERROR) if each)
        lowest.supxlabel("\n".join(stated), fontsize=FONT_PT)
