"""Iteration time against the tuner's budget, for every strategy: who gains from tuning, and when it stops.

No figure of arXiv:2605.27918 or the other papers. Cells of ``experiments/figure/tuning_budget.yaml``; a budget counts
simulated batches (docs/tuning.md). Times are relative to the fastest strategy's with the largest budget, seed by seed,
geometric mean over jobs; the CSV has every job with 95% CI.
"""

from functools import partial

import pandas as pd

from entrain_bench.answers.comparison import geometric_mean
from entrain_bench.answers.labels import names
from entrain_bench.answers.tables import JOB, interval_over_seeds, lacking, relative_over_seeds, run_table
from entrain_bench.answers.text import listing
from entrain_bench.figures._forms import heatmap
from entrain_bench.figures._style import ROW_IN, SINGLE_COLUMN_IN, Picture, panels

EXPERIMENT = "tuning_budget"
RUNS = True
BUDGET = "tuning_budget"
KEYS = [*JOB, "strategy", BUDGET]
load = partial(run_table, settings={BUDGET: BUDGET})


def draw(data: pd.DataFrame) -> Picture:
    """A row a strategy, the fastest on top, a column a budget."""
    labels = names(data, "strategy")
    budgets = sorted(data[BUDGET].unique())
    table = interval_over_seeds(data, KEYS, "iteration_time_s")
    largest = table[table[BUDGET] == budgets[-1]].dropna(subset="iteration_time_s")
    fastest = largest.sort_values("iteration_time_s", kind="stable").drop_duplicates(JOB)[KEYS]
    table = table.join(relative_over_seeds(data, data.merge(fastest, on=KEYS), KEYS, JOB), on=KEYS)
    by_budget = table.dropna(subset="relative").groupby(["strategy", BUDGET])["relative"]
    means = by_budget.agg(lambda ratios: geometric_mean(ratios.tolist())).unstack(BUDGET)
    means = means.sort_values(budgets[-1], kind="stable")
    figure, (panel,) = panels(1, 1, SINGLE_COLUMN_IN, 0.5 + ROW_IN * len(means))
    heatmap(panel, means.rename(index=labels))
    panel.set_xlabel("tuning budget (simulated batches)")
    loss = (means[budgets[0]] / means[budgets[-1]]).sort_values(ascending=False, kind="stable")
    flat = [labels[str(name)] for name, row in means.iterrows() if row.max() < 1.0005 * row.min()]
    message = f"Times over the fastest's with a budget of {budgets[-1]}. With {budgets[0]}, the median strategy takes "
    message += f"{100 * (loss.median() - 1):.1f}% longer, {labels[str(loss.index[0])]} {100 * (loss.iloc[0] - 1):.0f}%."
    message += f" The smallest budget already finds the final layout of {listing(flat)}." if flat else ""
    return Picture(figure, table, message + lacking(table, labels))
