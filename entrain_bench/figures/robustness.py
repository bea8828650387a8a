"""Ranking of strategies under other modeling choices: the fastest strategy, and rank correlations.

No figure of arXiv:2605.27918 or the other papers, which measure one system each. Rows of
``experiments/figure/robustness.yaml``: choices and constants of the cost model changed one at a time, strategies
planning again. Number and shade are Kendall's rank correlation (tau-b) of all strategies with the first row at the same
seed, mean over seeds. The fastest strategy over all seeds is named in the first row and where it is another, with an
exclamation mark if the first row's is significantly slower there.
"""

from collections.abc import Mapping, Sequence

import pandas as pd

from entrain_bench.answers.labels import names
from entrain_bench.answers.tables import ALL, JOB, rankings, run_tables
from entrain_bench.figures._forms import FEW_COLUMNS, heatmap
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, GOOD, ROW_IN, Picture, panels
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results

EXPERIMENT = "robustness"
RUNS = True


def load(cells: Mapping[str, Sequence[Cell]], results: Results) -> pd.DataFrame:
    """Fastest strategy and rank correlation of every row, model and trace."""
    return rankings(run_tables(cells, results))


def draw(table: pd.DataFrame) -> Picture:
    """A row a modeling choice, a column a model and trace."""
    cells = table[table["workload"] != ALL].fillna({"winner": ""})
    labels = {**names(cells.rename(columns={"winner": "strategy"}), "strategy"), "": "none"}
    traces, models = (names(cells, column) for column in ("workload", "model"))
    usual = cells.groupby(JOB)["winner"].transform("first")
    new = (cells["winner"] != usual) | (cells["row"] == cells["row"].iloc[0])
    named = cells["winner"].map(labels).where(new, "") + cells["firm"].map({True: "", False: "!"})
    cells = cells.assign(text=cells["tau"].map("{:.2f} ".format) + named)
    rows = [*cells["row"].unique()]
    jobs = [*cells[JOB].drop_duplicates().itertuples(index=False, name=None)]
    heads = [f"{models[model]}, {traces[trace]}" for model, trace in jobs]
    values, texts = (
        cells.pivot(index="row", columns=JOB, values=name).loc[rows, jobs].set_axis(heads, axis="columns")
        for name in ("tau", "text")
    )
    figure, (panel,) = panels(1, 1, DOUBLE_COLUMN_IN, 0.75 + ROW_IN * len(rows))
    heatmap(panel, values, texts, cmap=GOOD, vmin=0, vmax=1.6)
    if len(heads) <= FEW_COLUMNS:
        panel.set_xticks(panel.get_xticks(), heads, rotation=0, ha="center")
    panel.set_xlabel("rank correlation with the first row")
    wins = cells.loc[cells["winner"] != "", "winner"].tolist()
    most = max(labels, key=wins.count)
    changed = cells[cells["row"] != rows[0]]
    message = f"{labels[most]} is fastest in {wins.count(most)} of {len(cells)} cells. The first row's fastest stays "
    message += f"fastest, or not significantly slower, in {changed['firm'].sum()} of {len(changed)} cells."
    for tau, row in changed.dropna(subset="tau").sort_values("tau", kind="stable")[["tau", "row"]].values[:1]:
        message += f" Lowest rank correlation: {tau:.2f} ({row})."
    return Picture(figure, table, message)
