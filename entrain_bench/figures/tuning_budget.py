"""Iteration time against the tuner's budget, for every strategy: who gains from tuning, and when it stops.

No figure of arXiv:2605.27918 or the other papers. Cells of ``experiments/figure/tuning_budget.yaml``; a budget counts
simulated batches (docs/tuning.md). Times are relative to those with the largest budget, seed by seed, geometric mean
over jobs; the CSV has every job with 95% intervals.
"""

from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import Normalize
from seaborn import light_palette

from entrain_bench.answers.labels import names
from entrain_bench.answers.tables import interval_over_seeds, lacking, relative_over_seeds, run_table
from entrain_bench.answers.text import listing
from entrain_bench.figures._style import ROW_IN, SHADE, SINGLE_COLUMN_IN, Picture, heatmap, panels

EXPERIMENT = "tuning_budget"
RUNS = True
CASE = ["workload", "model", "strategy"]
BUDGET = "tuning_budget"
# Where shades end.
DARKEST = 1.3
load = partial(run_table, settings={BUDGET: BUDGET})


def draw(data: pd.DataFrame) -> Picture:
    """A row a strategy, those that gain most on top, a column a budget."""
    labels = names(data, "strategy")
    keys = [*CASE, BUDGET]
    budgets = sorted(data[BUDGET].unique())
    table = interval_over_seeds(data, keys, "iteration_time_s")
    largest = data[data[BUDGET] == budgets[-1]]
    table = table.join(relative_over_seeds(data, largest, keys, CASE), on=keys)
    logs = table.set_index(keys)["relative"].astype(float).map(np.log)
    means = (
        logs.groupby(level=["strategy", BUDGET])
        .mean()
        .unstack(BUDGET)
        .map(np.exp)
        .sort_values(budgets[0], ascending=False, kind="stable")
    )
    figure, (panel,) = panels(1, 1, SINGLE_COLUMN_IN, 0.6 + ROW_IN * len(means))
    shown = means.rename(index=labels)
    shades: dict[str, Any] = {"norm": Normalize(1, DARKEST), "cmap": light_palette(SHADE, as_cmap=True)}
    heatmap(panel, shown, shown.map("{:.2f}".format), **shades)
    panel.set_xlabel(f"Budget of the tuner (simulated batches);\ntime relative to a budget of {budgets[-1]}")
    flat = [labels[str(name)] for name, row in means.iterrows() if (row.round(3) == 1).all()]
    message = f"With a budget of {budgets[0]} instead of {budgets[-1]}, the median strategy takes "
    message += f"{100 * (means[budgets[0]].median() - 1):.1f}% longer, {shown.index[0]} "
    message += f"{100 * (means[budgets[0]].iloc[0] - 1):.0f}%."
    message += f" The budget does not matter to {listing(flat)}." if flat else ""
    return Picture(figure, table, message + lacking(table, labels))
