"""Iteration time with increasing errors of workload estimates, relative to estimates without error.

No figure of arXiv:2605.27918 or the other papers: their estimates are never wrong by more than their fits. Cells of
``experiments/figure/misprediction.yaml``; an error of e multiplies each sample's estimate by 1 + e u, u uniform in
[-1, 1] (docs/costs.md). Ratios are taken seed by seed; whiskers are 95 % intervals. Strategies that assign and order
without estimates stay at 1.
"""

from __future__ import annotations

from functools import partial

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from entrain_bench.answers.tables import interval_over_seeds, relative_over_seeds, run_table
from entrain_bench.figures._bars import Grid, draw_lines, line_handles
from entrain_bench.figures._style import facets, legend_above

EXPERIMENT = "misprediction"
RUNS = True
CASE = ["workload", "model", "strategy"]
load = partial(run_table, settings={"belief_error": "belief_error"})


def draw(data: pd.DataFrame) -> tuple[Figure, pd.DataFrame]:
    """A panel a model and trace, a line a strategy."""
    grid, keys = Grid.of(data), [*CASE, "belief_error"]
    # NaN without a run without error at the same seed.
    ratios = relative_over_seeds(data, data[data["belief_error"] == 0], keys, CASE)
    table = interval_over_seeds(data, keys, "iteration_time_s").join(ratios, on=keys)
    figure, axes = facets([*grid.models], [*grid.workloads], 0.4 + 1.7 * len(grid.models))
    for model, workload, panel in axes:
        rows = table[(table["workload"] == workload) & (table["model"] == model)]
        draw_lines(panel, rows, "belief_error", "relative", "strategy", grid.colours, grid.strategies)
        panel.set_title(f"{grid.workloads[workload]}, {grid.models[model]}")
        panel.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        if workload == next(iter(grid.workloads)):
            panel.set_ylabel("Iteration time,\nrelative to no error")
    figure.supxlabel("Relative error of the estimates", fontsize="medium")
    legend_above(figure, line_handles(grid.colours, grid.strategies))
    return figure, table
