"""Throughput by strategy, trace and model: samples per second, and model TFLOP/s of a GPU.

Corresponds to the comparisons of arXiv:2603.25120 (TFLOPS/GPU) and arXiv:2408.04275 (throughput), on the cells of
``experiments/figure/systems.yaml``. Bars are means over seeds, whiskers their
95 % intervals.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from entrain_bench.answers.tables import interval_over_seeds, run_table
from entrain_bench.figures._bars import Grid, draw_bars, interval_handle
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, NUMBER_FORMAT, legend_above, panels, strategy_handles

EXPERIMENT = "systems"
RUNS = True
METRICS = {"samples_per_s": "Samples/s", "tflops_per_gpu": "TFLOP/s of a GPU"}
CASE = ["workload", "model", "strategy"]
load = run_table


def draw(data: pd.DataFrame) -> tuple[Figure, pd.DataFrame]:
    """A row a metric, a panel a trace; bars of the strategies side by side for every model."""
    grid = Grid.of(data)
    tables = {metric: interval_over_seeds(data, CASE, metric) for metric in METRICS}
    figure, axes = panels(len(METRICS), len(grid.workloads), DOUBLE_COLUMN_IN, 3.2, sharex=True)
    for place, panel in enumerate(axes):
        metric, workload = list(METRICS)[place // len(grid.workloads)], [*grid.workloads][place % len(grid.workloads)]
        draw_bars(panel, grid, workload, tables[metric], metric)
        panel.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
        panel.yaxis.set_major_formatter(NUMBER_FORMAT)
        if place < len(grid.workloads):
            panel.set_title(grid.workloads[workload])
        if place % len(grid.workloads) == 0:
            panel.set_ylabel(METRICS[metric])
    first, second = tables.values()
    legend_above(figure, [*strategy_handles(grid.colours, grid.strategies), *interval_handle(first)])
    return figure, first.merge(second[[*CASE, *second.filter(like="tflops_per_gpu").columns]], on=CASE)
