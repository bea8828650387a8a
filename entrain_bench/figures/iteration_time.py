"""Iteration time by strategy, trace and model, every strategy tuned with one budget; lower bound of each layout.

Cells of ``experiments/figure/iteration_time.yaml``; drawn as Figure 11 of arXiv:2605.27918, whose setting is that of
``entrain_setting``. Bars are means over seeds, whiskers their 95 % intervals, numbers the speedup over the first
strategy seed by seed, pale where its interval includes 1. Of many strategies only the fastest of each family has a bar,
the others a mark. Traces differ by more than an order of magnitude, so every trace has its own axis. The line below
says which knobs are given and which ones are free.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from entrain_bench.answers.labels import FAMILIES, families
from entrain_bench.answers.tables import interval_over_seeds, over_seeds, run_table
from entrain_bench.figures._bars import (
    FILLED,
    Grid,
    draw_interval,
    interval_handle,
    mark_failed,
    mark_gap,
    speedup_over,
)
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, FAINT, INK, legend_above, panels, strategy_handles

EXPERIMENT = "iteration_time"
RUNS = True
MAX_COLUMNS = 5
# What the axis takes, and the least width of a bar that has a number above it.
AXIS_IN, BAR_IN = 0.4, 0.12
# Room above the highest bar for its speedup, as a share of the axis.
HEADROOM = 1.35
# More strategies are drawn by families.
MAX_BARS = 9
# Of a family's place on the x axis, the share of its bar; marks of the others share the rest.
BAR_SHARE = 0.5
# Marks that stand beside each other before the next is above the first again, and their size.
MARK_COLUMNS, MARK = 3, 2.4
CASE = ["workload", "model", "strategy"]
# What the line below the panels says is given or free, by its column.
KNOBS = {
    "TP": "layout.tp",
    "CP": "layout.cp",
    "PP": "layout.pp",
    "DP": "layout.dp",
    "microbatch size": "microbatch_size",
    "tuning": "tuning",
}
load = partial(run_table, settings=KNOBS)


def draw(data: pd.DataFrame) -> tuple[Figure, pd.DataFrame]:
    """A panel a trace; bars of the strategies side by side for every model."""
    grid, table, groups = Grid.of(data), summarise(data), groups_of(data)
    many = len(grid.strategies) > MAX_BARS
    columns = _columns(grid, len(groups) if many else len(grid.strategies))
    rows = -(-len(grid.workloads) // columns)
    figure, axes = panels(rows, columns, DOUBLE_COLUMN_IN, 0.35 + 1.6 * rows)
    for panel, workload in zip(axes, grid.workloads, strict=False):
        _draw_panel(panel, table[table["workload"] == workload], grid, groups if many else [])
        panel.set_title(grid.workloads[workload])
    for panel in axes[len(grid.workloads) :]:
        panel.set_visible(False)
    for panel in axes[::columns]:
        panel.set_ylabel("Iteration time (s)")
    bound = Line2D([], [], color=INK, linewidth=1.4, label="lower bound of the layout")
    look: dict[str, Any] = {"color": "white", "marker": "o", "linestyle": "", "markersize": MARK}
    others = [Line2D([], [], **look, mec=INK, mew=0.5, label="others of the family")] if many else []
    legend_above(figure, [*strategy_handles(grid.colours, grid.strategies), *others, bound, *interval_handle(table)])
    figure.supxlabel(setting_of(data), fontsize="medium")
    return figure, table


def setting_of(data: pd.DataFrame) -> str:
    """The knobs that all runs share with their value, then those that are free; empty without columns of knobs."""
    given, free = list[str](), list[str]()
    for knob in filter(data.columns.__contains__, KNOBS):
        values = data[knob].unique()
        if pd.isna(values).all():
            free.append(knob)
        elif len(values) == 1:
            given.append(f"{knob} {values[0]}")
    return "; ".join(filter(None, [", ".join(given), f"free: {', '.join(free)}" if free else ""]))


def summarise(data: pd.DataFrame) -> pd.DataFrame:
    """Means, intervals and failures by workload, model and strategy, with ``speedup`` over the first strategy."""
    table = interval_over_seeds(data, CASE, "iteration_time_s")
    bounds = over_seeds(data, CASE, lower_bound_s=("lower_bound_s", "mean"))
    table = table.merge(bounds[[*CASE, "lower_bound_s"]], on=CASE)
    first = data[data["strategy"] == table["strategy"].iloc[0]]
    return table.join(speedup_over(first, data, CASE, CASE[:2]), on=CASE)


def groups_of(data: pd.DataFrame) -> list[tuple[str, ...]]:
    """Strategies that share a place: the first one as the baseline, then every family's others by display order."""
    (baseline, _), *others = families(data).items()
    members = (tuple(name for name, theirs in others if theirs == family) for family in FAMILIES)
    return [(baseline,), *filter(None, members)]


def _columns(grid: Grid, num_bars: int) -> int:
    """Panels side by side that leave every bar wide enough."""
    panel_in = AXIS_IN + len(grid.models) * BAR_IN * num_bars / FILLED
    most = max(1, min(MAX_COLUMNS, len(grid.workloads), int(DOUBLE_COLUMN_IN / panel_in)))
    # As many in every row.
    return -(-len(grid.workloads) // -(-len(grid.workloads) // most))


def _draw_panel(panel: Axes, table: pd.DataFrame, grid: Grid, groups: Sequence[Sequence[str]]) -> None:
    cases = {(row["model"], row["strategy"]): row for row in table.to_dict("records")}
    top = float(table["iteration_time_s_high"].max())

    def draw_bar(panel: Axes, row: Mapping[Hashable, Any], position: float, width: float) -> None:
        strategy = str(row["strategy"])
        panel.bar(position, row["iteration_time_s"], 0.9 * width, color=grid.colours[strategy], zorder=2)
        draw_interval(panel, position, row, "iteration_time_s")
        half = 0.45 * width
        panel.hlines(row["lower_bound_s"], position - half, position + half, color=INK, linewidth=1.4, zorder=3)
        if strategy != next(iter(grid.strategies)) and not pd.isna(row["speedup"]):
            equal = row["speedup_low"] < 1 < row["speedup_high"]
            text = f"{row['speedup']:.2f}\N{MULTIPLICATION SIGN}"
            look: Any = {"rotation": 90, "ha": "center", "va": "bottom", "color": FAINT if equal else INK, "zorder": 4}
            panel.text(position, row["iteration_time_s_high"] + 0.03 * top, text, **look)
        mark_failed(panel, position, row)

    width = FILLED / len(groups or grid.strategies)
    bar = BAR_SHARE * width if groups else width
    for place, model in enumerate(grid.models):
        for step, members in enumerate(groups or [[name] for name in grid.strategies]):
            left = place - FILLED / 2 + step * width
            rows = [cases[model, name] for name in members if (model, name) in cases]
            # The fastest first; those that fail at some seeds come after all others.
            ran = [row for row in rows if row["num_ok"]]
            ran.sort(key=lambda row: (row["num_ok"] < row["num_runs"], row["iteration_time_s"]))
            if not ran:
                mark_gap(panel, left + bar / 2, bar, rows[0]["status"] if rows else "no cell")
                continue
            draw_bar(panel, ran[0], left + bar / 2, bar)
            for index, row in enumerate(ran[1:]):
                position = left + bar + (index % MARK_COLUMNS + 1) / (MARK_COLUMNS + 1) * (width - bar)
                look: Any = {"markersize": MARK, "color": grid.colours[str(row["strategy"])], "mec": INK, "mew": 0.25}
                panel.plot(position, row["iteration_time_s"], "o", **look, zorder=3)
    panel.set_ylim(0, HEADROOM * top if top > 0 else 1)
    panel.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    grid.label_models(panel)
