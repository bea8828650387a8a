"""Ranking of strategies under other modeling choices: the fastest strategy, and rank correlations.

No figure of arXiv:2605.27918 or the other papers, which measure one system each. Rows of
``experiments/figure/robustness.yaml``: choices and constants of the cost model changed one at a time, strategies
planning again. A cell names the fastest strategy of a model and trace over all seeds, with an exclamation mark if the
first row's fastest is significantly slower there. Number and shade are Kendall's rank correlation (tau-b) of all
strategies with the first row at the same seed, mean over seeds.
"""

from collections.abc import Mapping

import pandas as pd
from seaborn import light_palette

from entrain_bench.answers.labels import names
from entrain_bench.answers.tables import ALL, JOB, rankings, run_tables
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, ROW_IN, Picture, heatmap, panels

EXPERIMENT = "robustness"
RUNS = True
load = run_tables


def draw(data: pd.DataFrame) -> Picture:
    """A row a modeling choice, a column a model and trace."""
    labels, traces, models = (names(data, column) for column in ("strategy", "workload", "model"))
    table = rankings(data)
    cells = table[table["workload"] != ALL]
    marks = cells["firm"].map({True: "", False: " !"})
    fastest = cells["winner"].map(labels).fillna("none")
    cells = cells.assign(text=fastest + marks + "  " + cells["tau"].map("{:.2f}".format))
    rows = [*data["row"].unique()]
    jobs = [*data[JOB].drop_duplicates().itertuples(index=False, name=None)]
    wide = {name: cells.pivot(index="row", columns=JOB, values=name).loc[rows, jobs] for name in ("tau", "text")}
    heads = [f"{models[model]}, {traces[trace]}" for model, trace in jobs]
    figure, (panel,) = panels(1, 1, DOUBLE_COLUMN_IN, 0.6 + ROW_IN * len(rows))
    shades = {"cmap": light_palette("#0173b2", as_cmap=True), "vmin": 0, "vmax": 1.6}
    heatmap(panel, *(each.set_axis(heads, axis=1) for each in wide.values()), **shades)
    panel.xaxis.tick_top()
    panel.set_xticks(panel.get_xticks(), heads, rotation=0, ha="center")
    panel.tick_params(length=0)
    return Picture(figure, table, _message(table, labels))


def _message(table: pd.DataFrame, labels: Mapping[str, str]) -> str:
    cells = table[table["workload"] != ALL]
    wins = cells.loc[cells["winner"] != "", "winner"].tolist()
    most = max(labels, key=wins.count)
    changed = cells[cells["row"] != cells["row"].iloc[0]]
    message = f"{labels[most]} is fastest in {wins.count(most)} of {len(cells)} cells. The first row's fastest stays "
    message += f"fastest, or not significantly slower, in {changed['firm'].sum()} of {len(changed)} cells."
    least = changed.dropna(subset="tau").sort_values("tau", kind="stable").head(1)
    return message + "".join(
        f" Lowest rank correlation: {tau:.2f} ({row})." for tau, row in least[["tau", "row"]].values
    )
