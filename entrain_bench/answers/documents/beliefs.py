"""How far believed iteration times are from simulated ones: a table for ``docs/costs.md``."""

from __future__ import annotations

import pandas as pd

from entrain_bench.answers.text import markdown_table
from entrain_bench.records.metrics import BELIEVED

# The table's name, and the page of ``docs`` that has it.
TABLE = "beliefs"
PAGE = "costs.md"
# What nobody can believe exactly: estimates that are made wrong, and noise of single actions.
EXACT = ("belief_error", "belief_bias", "action_noise")
CELL = ["strategy", "workload", "model", "cluster", "seed"]


def belief_errors(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs whose beliefs are exact, with the relative ``error`` of their believed iteration time.

    Args:
        runs: rows of ``table_of``; without the metric, as from older runs, none is returned.
    """
    if BELIEVED not in runs:
        return runs.iloc[:0].assign(error=pd.Series(dtype="float64"))
    exact = runs["status"].eq("ok") & runs[BELIEVED].notna() & runs[[*EXACT]].eq(0).all(axis=1)
    return runs[exact].assign(error=lambda table: (table[BELIEVED] / table["iteration_time_s"] - 1).abs())


def beliefs_markdown(runs: pd.DataFrame) -> str:
    """A row for each strategy: number of runs, median and worst error, and the run with the worst."""
    rows = []
    for strategy, group in belief_errors(runs).groupby("strategy", sort=True):
        worst = group.sort_values([*CELL, "key"], kind="stable").sort_values("error", ascending=False, kind="stable")
        place = ", ".join(str(worst[name].iloc[0]) for name in CELL[1:])
        errors = (f"{group['error'].median():.2%}", f"{worst['error'].iloc[0]:.1%}")
        rows.append([str(strategy), f"{len(group):,}", *errors, place])
    headings = ["strategy", "runs", "median", "worst", "worst run: workload, model, cluster, seed"]
    return markdown_table(headings, rows, right=["runs", "median", "worst"])
