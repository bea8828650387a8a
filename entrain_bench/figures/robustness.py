"""Ranking of strategies under other modeling choices: the fastest strategy, and rank correlations.

No figure of arXiv:2605.27918 or the other papers, which measure one system each. Rows of
``experiments/figure/robustness.yaml``: choices and constants of the cost model changed one at a time, strategies
planning again. A cell names the fastest strategy of a model and trace over all seeds, in its color; a
frame says that the first row's fastest is significantly slower there. The number is Kendall's rank correlation (tau-b)
of all strategies with the first row at the same seed, mean over seeds; dots are means over all cells of a row with
their 95% intervals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from entrain_bench.answers.tables import ALL, rankings
from entrain_bench.figures._bars import Grid, run_tables
from entrain_bench.figures._style import (
    DOUBLE_COLUMN_IN,
    INK,
    legend_above,
    lighter,
    panels,
    say,
    show_grid,
    show_reason,
)

EXPERIMENT = "robustness"
RUNS = True
ROW_IN = 0.2
HEAD_IN = 1.0
# Width of a cell, where correlations take 1.
CELL = 0.65
# Where name and number begin and end, from the middle of the cell.
EDGE = 0.45
# How far the frame of a cell is from its edges, of the cell.
FRAME = 0.04
load = run_tables


def draw(data: pd.DataFrame) -> tuple[Figure, pd.DataFrame]:
    """Left: a column a model and trace. Right: rank correlations of every row."""
    grid = Grid.of(data)
    table = rankings(data)
    rows = [*data["row"].unique()]
    height_in = HEAD_IN + ROW_IN * len(rows)
    widths = (CELL * len(grid.models) * len(grid.workloads), 1.0)
    figure, (left, right) = panels(1, 2, DOUBLE_COLUMN_IN, height_in, sharey=True, width_ratios=widths)
    _draw_winners(left, table[table["workload"] != ALL], grid, rows)
    _draw_correlations(right, table[table["workload"] == ALL].set_index("row"), rows)
    slower = Patch(facecolor="white", edgecolor=INK, label="first row's fastest is significantly slower")
    number = Patch(facecolor="none", label="number: rank correlation with the first row")
    legend_above(figure, [slower, number])
    say(figure, _message(table, grid.strategies))
    return figure, table


def _message(table: pd.DataFrame, labels: Mapping[str, str]) -> str:
    """The strategy that is fastest most often, the first row's fastest, and the lowest correlation of a row."""
    cells = table[table["workload"] != ALL]
    together = table[table["workload"] == ALL]
    wins = cells.loc[cells["winner"] != "", "winner"].tolist()
    most = max(labels, key=wins.count)
    first = f"{labels[most]} is fastest in {wins.count(most)} of {len(cells)} cells"
    changed = cells[cells["row"] != cells["row"].iloc[0]]
    kept = f"the first row's fastest stays fastest, or not significantly slower, in {changed['firm'].sum()}"
    least = together.dropna(subset="tau").sort_values("tau", kind="stable").to_dict("records")[:1]
    said = f"{first}; {kept} of {len(changed)} cells"
    return said + "".join(f"; rank correlation at least {row['tau']:.2f} ({row['row']})" for row in least) + "."


def _draw_winners(panel: Axes, table: pd.DataFrame, grid: Grid, rows: Sequence[str]) -> None:
    cases = [*product(grid.models, grid.workloads)]
    for row in table.to_dict("records"):
        x = cases.index((row["model"], row["workload"]))
        y = rows.index(row["row"])
        colour = lighter(grid.colours[row["winner"]]) if row["winner"] else "white"
        panel.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, edgecolor="white", linewidth=1.0))
        if not row["firm"]:
            corner = (x - 0.5 + FRAME / 2, y - 0.5 + 1.5 * FRAME)
            size = (1 - FRAME, 1 - 3 * FRAME)
            panel.add_patch(Rectangle(corner, *size, fill=False, edgecolor=INK, linewidth=0.9))
        panel.text(x - EDGE, y, grid.strategies.get(row["winner"], "none"), va="center", color=INK)
        panel.text(x + EDGE, y, f"{row['tau']:.2f}", ha="right", va="center", color=INK)
    labels = [f"{grid.models[model]}\n{grid.workloads[workload]}" for model, workload in cases]
    show_grid(panel, labels, rows)
    panel.xaxis.tick_top()


def _draw_correlations(panel: Axes, table: pd.DataFrame, rows: Sequence[str]) -> None:
    if table["tau"].isna().all():
        show_reason(panel, "no data")
        return
    places = [rows.index(str(row)) for row in table.index]
    panel.hlines(places, table["tau_low"], table["tau_high"], color=INK, linewidth=0.9)
    panel.plot(table["tau"], places, "o", color=INK, markersize=3.5)
    panel.set_title("Rank correlation, all columns")
    panel.set_xlim(min(0.0, float(table["tau_low"].min())) - 0.03, 1.03)
    panel.tick_params(axis="y", length=0)
