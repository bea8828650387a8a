"""Iteration time by strategy, trace and model, and the lower bound of each layout.

Corresponds to arXiv:2605.27918, Figure 11; cells of ``experiments/figure/iteration_time.yaml``. Bars are means over seeds,
whiskers the least and the most, numbers the speedup over the first strategy. Traces differ by more than an order of
magnitude, so every trace has its own axis.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from entrain_bench.compose import Cell
from entrain_bench.figures._bars import Grid, mark_gap
from entrain_bench.figures._data import run_table
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, INK, legend_above, panels, strategy_handles
from entrain_bench.records import Results

EXPERIMENT = "iteration_time"
RUNS = True
COLUMNS = 5
# Room above the highest bar for its speedup, as a share of the axis.
HEADROOM = 1.3
CASE = ["workload", "model", "strategy"]


def load(cells: Sequence[Cell], results: Results) -> pd.DataFrame:
    """The table of the sweep's runs."""
    return run_table(cells, results)


def draw(data: pd.DataFrame) -> tuple[Figure, pd.DataFrame]:
    """A panel a trace; bars of the strategies side by side for every model."""
    grid, table = Grid.of(data), summarise(data)
    columns = min(COLUMNS, len(grid.workloads))
    rows = -(-len(grid.workloads) // columns)
    figure, axes = panels(rows, columns, DOUBLE_COLUMN_IN, 0.35 + 1.6 * rows)
    for panel, workload in zip(axes, grid.workloads, strict=False):
        _draw_panel(panel, table[table["workload"] == workload].set_index(["model", "strategy"]), grid)
        panel.set_title(grid.workloads[workload])
    for panel in axes[len(grid.workloads) :]:
        panel.set_visible(False)
    for panel in axes[::columns]:
        panel.set_ylabel("Iteration time (s)")
    bound = Line2D([], [], color=INK, linewidth=1.4, label="lower bound of the layout")
    spread = Line2D([], [], color=INK, linewidth=0.7, marker="|", linestyle="", markersize=7, label="min to max of seeds")
    legend_above(figure, [*strategy_handles(grid.colours, grid.strategies), bound, spread])
    return figure, table


def summarise(data: pd.DataFrame) -> pd.DataFrame:
    """One row for every workload, model and strategy: statistics over the seeds that succeeded, and what failed."""
    rows = []
    for case, runs in data.groupby(CASE, sort=False):
        done = runs[runs["status"] == "ok"]
        bad = runs[runs["status"] != "ok"]
        seconds = done["iteration_time_s"] if len(done) else pd.Series([], dtype=float)
        row = {
            "num_seeds": len(runs),
            "num_ok": len(done),
            "iteration_time_s": seconds.mean(),
            "least_s": seconds.min(),
            "most_s": seconds.max(),
            "lower_bound_s": done["lower_bound_s"].mean() if len(done) else None,
            "status": bad["status"].iloc[0] if len(bad) else "ok",
            "reason": bad["reason"].iloc[0] if len(bad) else "",
        }
        rows.append(dict(zip(CASE, case, strict=True)) | row)
    table = pd.DataFrame(rows)
    first = table[table["strategy"] == table["strategy"].iloc[0]].set_index(["workload", "model"])["iteration_time_s"]
    baseline = [first.get((row.workload, row.model)) for row in table.itertuples()]
    table.insert(8, "speedup", pd.Series(baseline, dtype=float) / table["iteration_time_s"])
    return table


def _draw_panel(panel: Axes, table: pd.DataFrame, grid: Grid) -> None:
    first = next(iter(grid.strategies))
    top = table["most_s"].max()
    for model, strategy, position in grid.places():
        status, row = "missing", None
        if (model, strategy) in table.index:
            row = table.loc[(model, strategy)]
            status = row["status"]
        if row is None or not row["num_ok"]:
            mark_gap(panel, position, grid.width, status)
            continue
        mean = row["iteration_time_s"]
        panel.bar(position, mean, 0.9 * grid.width, color=grid.colours[strategy], zorder=2)
        panel.vlines(position, row["least_s"], row["most_s"], color=INK, linewidth=0.7, zorder=3)
        half = 0.45 * grid.width
        panel.hlines(row["lower_bound_s"], position - half, position + half, color=INK, linewidth=1.4, zorder=3)
        notes = [] if strategy == first or pd.isna(row["speedup"]) else [f"{row['speedup']:.2f}\N{MULTIPLICATION SIGN}"]
        if row["num_ok"] < row["num_seeds"]:
            notes.append(f"{row['num_ok']} of {row['num_seeds']} seeds")
        panel.text(position, row["most_s"] + 0.03 * top, " ".join(notes), rotation=90, ha="center", va="bottom")
    panel.set_ylim(0, HEADROOM * top if top > 0 else 1)
    panel.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    grid.label_models(panel)
