"""The look that all figures share: seaborn's paper theme, a colour for each system, sizes, panels without data."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from itertools import cycle
from threading import RLock
from typing import Any, NamedTuple

import matplotlib as mpl
import pandas as pd
import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from entrain_bench.answers.labels import FAMILIES, OURS, families, orders

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
_FAMILY_HEX = {"published": "#0173b2", "out_of_the_box": "#8f8f8f", OURS: "#de8f05", "": "#402a00"}
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


def small_png(draw: Callable[[], Figure]) -> bytes:
    """A figure for a page of many: the same bytes for the same data."""
    file = BytesIO()
    with styled():
        draw().savefig(file, format="png", dpi=SMALL_DPI, metadata={"Software": None})
    return file.getvalue()


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


def family_colours(data: pd.DataFrame) -> dict[str, Colour]:
    """The colour of every strategy's family."""
    return {name: FAMILY_COLOURS[family] for name, family in families(data).items()}


def family_handles(data: pd.DataFrame) -> list[Artist]:
    """A dot for each family that a table has, if there are several."""
    present = {*families(data).values()}
    style: dict[str, Any] = {"marker": "o", "linestyle": "", "markersize": 4}
    shown = [family for family in FAMILIES if family in present]
    handles = [mpl.lines.Line2D([], [], color=FAMILY_COLOURS[each], label=FAMILIES[each], **style) for each in shown]
    return [*handles] if len(shown) > 1 else []


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
