"""The look that figures share: seaborn's theme, sizes, one color per system, legends, and panels without data."""

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from matplotlib.ticker import EngFormatter, FuncFormatter

from entrain_bench.answers.labels import OURS, families, orders

mpl.use("Agg")

_DRAWING = RLock()
SINGLE_COLUMN_IN = 3.35
DOUBLE_COLUMN_IN = 7.0
MAX_HEIGHT_IN = {SINGLE_COLUMN_IN: 3.0, DOUBLE_COLUMN_IN: 4.5}
# Height of a row of names at this size.
ROW_IN = 0.165
FONT_PT = 7.0
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
        "axes.axisbelow": True,
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

COLOURBLIND: list[Colour] = [*sns.color_palette("colorblind")]
# Of traces and jobs: neither our orange nor the published systems' blue.
_OTHER_HEX = ["#029e73", "#cc78bc", "#56b4e9", "#6a3d9a", "#949494", "#d55e00", "#3b3b3b", "#b5bd00"]
# Colors of compared systems by display order, the last for one without. Every two, and our own
# orange, differ by a CIEDE2000 of at least 15, also as seen with deuteranopia.
_SYSTEM_HEX = ["#8c8c8c", "#0173b2", "#005555", "#aa1555", "#8095ff", "#aa5515", "#eabfff", "#402a00", "#2a1580"]
SYSTEM_COLOURS: list[Colour] = [*map(to_rgb, [*_SYSTEM_HEX, "#ffeaaa"])]
NUM_ORDERED = len(SYSTEM_COLOURS) - 1
# Colors where more systems are shown than have one of their own, by ``strategy.family``.
_FAMILY_HEX = {"published": "#0173b2", "out_of_the_box": "#8f8f8f", "simple": "#005555", OURS: "#de8f05", "": "#402a00"}
FAMILY_COLOURS: dict[str, Colour] = {family: to_rgb(colour) for family, colour in _FAMILY_HEX.items()}
# Shades of worse and of good values.
WORSE = sns.light_palette("#d55e00", as_cmap=True)
GOOD = sns.light_palette("#0173b2", as_cmap=True)


class Picture(NamedTuple):
    """A figure, its data as a table, and its message: a sentence for the caption, empty for none."""

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
    figure = Figure(figsize=(width_in, min(height_in, MAX_HEIGHT_IN[width_in])), layout="constrained")
    return figure, [*figure.subplots(rows, columns, squeeze=False, **options).flat]


def palette(names: Iterable[str]) -> dict[str, Colour]:
    """A color for each name that is no system's, by order of appearance."""
    return dict(zip(names, cycle(map(to_rgb, _OTHER_HEX)), strict=False))


def system_colours(data: pd.DataFrame) -> dict[str, Colour]:
    """The color of every strategy of a run table, the same in every figure: ours orange, others by display order."""
    family = families(data)
    return strategy_colours(orders(data), {name for name in family if family[name] == OURS})


def strategy_colours(display_orders: Mapping[str, int | None], ours: Iterable[str] = ()) -> dict[str, Colour]:
    """Colors by display order; strategies without one take theirs from the other end."""
    unordered = (-1 - place for place in range(len(display_orders)))
    colours = dict[str, Colour]()
    for name, order in display_orders.items():
        place = next(unordered) if order is None else order
        colour = SYSTEM_COLOURS[place % NUM_ORDERED if place >= 0 else max(place, -NUM_ORDERED)]
        # Once all are taken, lighter ones follow.
        colours[name] = mixed(colour, 1.0) if place >= NUM_ORDERED else colour
    return colours | dict.fromkeys(ours, FAMILY_COLOURS[OURS])


def mixed(colour: Colour, ground: float, share: float = 0.55) -> Colour:
    """The color mixed with white (``ground`` 1) or black (0)."""
    red, green, blue = (part + (ground - part) * share for part in colour)
    return red, green, blue


def legend_above(figure: Figure, handles: Sequence[Artist], columns: int = 6) -> None:
    """Draw one legend for the figure above all panels."""
    columns = min(columns, len(handles))
    figure.legend(handles=[*handles], loc="outside upper center", ncols=columns, handletextpad=0.4)


NUMBER_FORMAT = FuncFormatter(lambda value, _: EngFormatter(sep="")(value) if value >= 1 else f"{value:g}")


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
