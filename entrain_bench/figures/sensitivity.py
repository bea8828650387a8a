"""Iteration time against the split of a replica's pipeline stages between encoder and LLM.

Corresponds to arXiv:2605.27918, Figure 14; cells of ``experiments/figure/sensitivity.yaml``, which force every split on
one strategy. Times are relative to those of the split that is best on average, seed by seed, with 95% CI; large
markers are the splits that the planner chooses, at any seed.
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.lines import Line2D

from entrain_bench.answers import tables
from entrain_bench.answers.labels import names
from entrain_bench.answers.text import count
from entrain_bench.figures._forms import handles, lines, marker_of
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, INK, Picture, legend_above, palette, panels
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results

EXPERIMENT = "sensitivity"
RUNS = True
# Relative times up to this are as good as the best split.
CLOSE = 1.01
CHOSEN: dict[str, Any] = {"markersize": 6.5, "mec": INK, "mew": 0.9, "clip_on": False}


def load(cells: Sequence[Cell], results: Results) -> pd.DataFrame:
    """The table of the sweep's runs; ``forced_stages`` is empty where the planner chose."""
    table = tables.run_table(cells, results, {"forced_stages": "strategy.planner.encoder_stages"})
    chosen = {cell.key: tables.encoder_stages_and_gpus(cell, results.read(cell.key))[0] for cell in cells}
    return table.assign(encoder_stages=table["forced_stages"].fillna(table["key"].map(chosen)))


def draw(data: pd.DataFrame) -> Picture:
    """A panel a model, a line a trace."""
    models, traces = (names(data, column) for column in tables.JOB)
    colours = palette(traces)
    table = tables.split_times(data)
    figure, axes = panels(1, len(models), DOUBLE_COLUMN_IN, 2.2, sharey=True)
    for panel, model in zip(axes, models, strict=True):
        rows = table[table["model"] == model]
        lines(panel, rows, "encoder_stages", "relative", "workload", colours, traces)
        for trace, marker in marker_of(traces).items():
            own = rows[rows["planned"] & (rows["workload"] == trace)]
            panel.plot(own["encoder_stages"], own["relative"], marker, **CHOSEN, mfc=colours[trace], zorder=3)
        panel.set(title=models[model], xlabel="pipeline stages of the encoder")
        panel.set_xticks(sorted(table["encoder_stages"].unique()))
    axes[0].set_ylim(bottom=0.95)
    axes[0].set_ylabel("time / best split's")
    handle = Line2D([], [], marker="o", mfc="white", linestyle="", label="the planner's own split", **CHOSEN)
    legend_above(figure, [*handles(colours, traces), handle])
    taken = table[table["planned"]].groupby(tables.JOB)["relative"].min().dropna()
    jobs = count(len(taken), "job")
    behind = f", and at most {100 * (taken.max() - 1):.0f}% slower on the others" if len(taken) else ""
    message = f"The planner's own split is within 1% of the best on {(taken <= CLOSE).sum()} of {jobs}{behind}."
    return Picture(figure, table, message + tables.lacking(table, traces, by="workload"))
