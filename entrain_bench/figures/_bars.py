"""Strategies side by side within a model, and lines over a swept number: what several figures of runs share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from entrain_bench.answers.labels import names, orders
from entrain_bench.answers.tables import relative_over_seeds, run_table
from entrain_bench.figures._style import (
    INK,
    SMALL_PT,
    Colour,
    marker_of,
    show_reason,
    strategy_colours,
)
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results

# Of the distance between two models, the share that their strategies fill.
FILLED = 0.8


@dataclass(frozen=True, slots=True)
class Grid:
    """Values of strategy, workload and model with their labels, in order of appearance, and strategies' colours."""

    strategies: dict[str, str]
    workloads: dict[str, str]
    models: dict[str, str]
    colours: dict[str, Colour]

    @classmethod
    def of(cls, table: pd.DataFrame) -> Grid:
        """The grid of a run table."""
        colours = strategy_colours(orders(table))
        return cls(names(table, "strategy"), names(table, "workload"), names(table, "model"), colours)

    @property
    def width(self) -> float:
        """Width of a strategy's place on the x axis; models are 1 apart."""
        return FILLED / len(self.strategies)

    def places(self) -> Iterator[tuple[str, str, float]]:
        """Model, strategy and x position of every bar of a panel."""
        for place, model in enumerate(self.models):
            for step, strategy in enumerate(self.strategies):
                yield model, strategy, place + (step + 0.5) * self.width - FILLED / 2

    def label_models(self, panel: Axes) -> None:
        """Models as ticks of the x axis."""
        panel.set_xticks(range(len(self.models)), list(self.models.values()))
        panel.set_xlim(-0.5, len(self.models) - 0.5)
        panel.tick_params(axis="x", length=0)
        panel.grid(visible=False, axis="x")


def run_tables(cells: Mapping[str, Sequence[Cell]], results: Results) -> pd.DataFrame:
    """The runs of all rows of a figure's YAML, by the column ``row``."""
    tables = [run_table(mine, results).assign(row=label) for label, mine in cells.items()]
    return pd.concat(tables, ignore_index=True)


def speedup_over(reference: pd.DataFrame, data: pd.DataFrame, keys: Sequence[str], on: Sequence[str]) -> pd.DataFrame:
    """``speedup`` with its ends over reference runs that share keys (``relative_over_seeds``), by the keys."""
    slower = relative_over_seeds(data, reference, keys, on)
    # A ratio's ends are those of its inverse the other way round.
    ends = {"speedup": "relative", "speedup_low": "relative_high", "speedup_high": "relative_low"}
    return pd.DataFrame({name: 1 / slower[end] for name, end in ends.items()})


def mark_gap(panel: Axes, position: float, width: float, status: str) -> None:
    """A hatched place with the reason, where a strategy has no result."""
    span = (position - 0.45 * width, position + 0.45 * width)
    panel.axvspan(*span, facecolor="white", edgecolor="#b0b0b0", hatch="////", linewidth=0.5, zorder=0.5)
    # Small and without a background: neighbors begin where the place ends.
    look: dict[str, Any] = {"rotation": 90, "ha": "center", "va": "top", "size": SMALL_PT}
    panel.text(position, 0.98, status, transform=panel.get_xaxis_transform(), **look)


def interval_handle(table: pd.DataFrame) -> list[Artist]:
    """Return a legend entry for whiskers, if several seeds ran."""
    style: dict[str, Any] = {"color": INK, "linewidth": 0.7, "marker": "|", "linestyle": "", "markersize": 7}
    return [Line2D([], [], **style, label="95% interval")] if (table["num_ok"] > 1).any() else []


MARKER_SIZE = 3.5


def draw_lines(
    panel: Axes, table: pd.DataFrame, x: str, y: str, by: str, colours: Mapping[str, Colour], labels: Mapping[str, str]
) -> None:
    """A line for each name with a colour, points in the order of x; lines that lack points or seeds are named.

    Markers follow the order of all labels.

    Where the table has ``<y>_low`` and ``<y>_high``, whiskers show that interval.
    """
    if table[y].notna().sum() == 0:
        show_reason(panel, "; ".join(table["reason"].unique()) or "no data")
        return
    lacking = []
    markers = marker_of(labels)
    for name in colours:
        marker = markers[name]
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
    """A line with its marker for each name that has a colour."""
    markers = marker_of(labels)
    return [
        Line2D([], [], color=colour, marker=markers[name], markersize=MARKER_SIZE, label=labels[name])
        for name, colour in colours.items()
    ]
