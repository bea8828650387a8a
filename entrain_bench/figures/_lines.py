"""Lines over a swept number: what several figures of runs share."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from entrain_bench.figures._style import INK, Colour, marker_of, show_reason

MARKER_SIZE = 3.5


def draw_lines(
    panel: Axes, table: pd.DataFrame, x: str, y: str, by: str, colours: Mapping[str, Colour], labels: Mapping[str, str]
) -> None:
    """A line a name, its points in the order of x; lines without all their points, or seeds of them, are named.

    Where the table has ``<y>_low`` and ``<y>_high``, whiskers show that interval.
    """
    if table[y].notna().sum() == 0:
        show_reason(panel, "; ".join(table["reason"].unique()) or "no data")
        return
    lacking = []
    for name, marker in marker_of(colours).items():
        rows = table[table[by] == name].sort_values(x)
        panel.plot(rows[x], rows[y], color=colours[name], marker=marker, markersize=MARKER_SIZE, mec="white", mew=0.3)
        if f"{y}_low" in rows:
            panel.vlines(rows[x], rows[f"{y}_low"], rows[f"{y}_high"], color=colours[name], linewidth=0.7)
        without = int((rows["num_runs"] - rows["num_ok"]).sum())
        if without or rows.empty:
            state = next((s for s in rows["status"] if s != "ok"), "missing")
            lacking.append(f"{labels[name]}: {without} {state}")
    if lacking:
        style = {"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.8}
        panel.text(0.03, 0.97, "\n".join(lacking), transform=panel.transAxes, va="top", color=INK, bbox=style)


def line_handles(colours: Mapping[str, Colour], labels: Mapping[str, str]) -> list[Artist]:
    """A line with its marker for each name."""
    return [
        Line2D([], [], color=colours[name], marker=marker, markersize=MARKER_SIZE, label=labels[name])
        for name, marker in marker_of(colours).items()
    ]
