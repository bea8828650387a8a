"""Iteration time against the tuner's budget, for every strategy: who gains from tuning, and when it stops.

No figure of arXiv:2605.27918 or the other papers. Cells of ``experiments/figure/tuning_budget.yaml``; a budget counts
simulated batches (docs/tuning.md). Times are relative to those with the largest budget, seed by seed; their 95%
intervals are in the CSV file.
"""

from __future__ import annotations

from functools import partial

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from entrain_bench.answers.labels import FAMILIES, families
from entrain_bench.answers.tables import interval_over_seeds, relative_over_seeds, run_table
from entrain_bench.figures._bars import Grid, draw_lines, line_handles
from entrain_bench.figures._style import facets, legend_above, say

EXPERIMENT = "tuning_budget"
RUNS = True
CASE = ["workload", "model", "strategy"]
BUDGET = "tuning_budget"
WHISKERS = ["relative_low", "relative_high"]
load = partial(run_table, settings={BUDGET: BUDGET})


def draw(data: pd.DataFrame) -> tuple[Figure, pd.DataFrame]:
    """A row of panels for each model and trace, a column for each family, a line for each strategy."""
    grid = Grid.of(data)
    keys = [*CASE, BUDGET]
    budgets = sorted(data[BUDGET].unique())
    largest = data[data[BUDGET] == budgets[-1]]
    table = interval_over_seeds(data, keys, "iteration_time_s")
    table = table.join(relative_over_seeds(data, largest, keys, CASE), on=keys)
    # Budgets double, so each is one step from the next.
    lines = table.assign(place=table[BUDGET].map(budgets.index)).drop(columns=WHISKERS)
    members = families(data)
    columns = [family for family in FAMILIES if family in members.values()]
    cases = [(model, workload) for model in grid.models for workload in grid.workloads]
    figure, axes = facets(cases, columns, 0.9 + 1.6 * len(cases), sharex=True, sharey="row")
    for (model, workload), family, panel in axes:
        colours = {name: colour for name, colour in grid.colours.items() if members[name] == family}
        rows = lines[(lines["workload"] == workload) & (lines["model"] == model)]
        draw_lines(
            panel, rows[rows["strategy"].isin(colours)], "place", "relative", "strategy", colours, grid.strategies
        )
        panel.set_xticks(range(len(budgets)), [str(budget) for budget in budgets])
        panel.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        if (model, workload) == cases[0]:
            panel.set_title(FAMILIES[family])
        if family == columns[0]:
            panel.set_ylabel(f"{grid.models[model]} {grid.workloads[workload]}:\ntime, relative to {budgets[-1]}")
    figure.supxlabel("Budget of the tuner (simulated batches)", fontsize="medium")
    by_family = sorted(grid.colours, key=lambda name: columns.index(members[name]))
    legend_above(figure, line_handles({name: grid.colours[name] for name in by_family}, grid.strategies))
    smallest = table[table[BUDGET] == budgets[0]].groupby("strategy", sort=False)["relative"].mean().dropna()
    if len(smallest):
        most = f"{grid.strategies[str(smallest.idxmax())]} {100 * (smallest.max() - 1):.0f}%"
        typical = f"{100 * (smallest.median() - 1):.1f}%"
        change = f"With a budget of {budgets[0]} instead of {budgets[-1]}"
        say(figure, f"{change}, the median strategy takes {typical} longer, {most}.")
    return figure, table
