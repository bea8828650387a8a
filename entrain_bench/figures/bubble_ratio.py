"""Share of GPU time that is idle, by strategy and trace, in a pipeline of 4 stages and 16 microbatches.

Corresponds to arXiv:2605.27918, Figure 6; cells of ``experiments/figure/bubble_ratio.yaml``. Bars are means over seeds
and iterations, whiskers their 95 % intervals; communication inside actions counts as busy (docs/metrics.md).
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from entrain_bench.answers.tables import interval_over_seeds, run_table
from entrain_bench.figures._bars import Grid, draw_bars, interval_handle
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, legend_above, panels, strategy_handles

EXPERIMENT = "bubble_ratio"
RUNS = True
CASE = ["workload", "model", "strategy"]
load = run_table


def draw(data: pd.DataFrame) -> tuple[Figure, pd.DataFrame]:
    """A panel a trace, bars of the strategies side by side for every model."""
    grid = Grid.of(data)
    table = interval_over_seeds(data, CASE, "bubble_ratio")
    figure, axes = panels(1, len(grid.workloads), DOUBLE_COLUMN_IN, 1.8, sharey=True)
    for panel, workload in zip(axes, grid.workloads, strict=True):
        draw_bars(panel, grid, workload, table, "bubble_ratio")
        panel.set_title(grid.workloads[workload])
    axes[0].set_ylim(0, 1)
    axes[0].yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    axes[0].set_ylabel("Idle share of GPU time")
    legend_above(figure, [*strategy_handles(grid.colours, grid.strategies), *interval_handle(table)])
    return figure, table
