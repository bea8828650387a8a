"""Iteration time against the split of a replica's pipeline stages between encoder and LLM.

Corresponds to arXiv:2605.27918, Figure 14; cells of ``experiments/figure/sensitivity.yaml``, which force every split on
one strategy. Times are relative to those of the split that is best on average, seed by seed, with 95% intervals; large
markers are the splits that the planner takes by itself, at any seed.
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from entrain_bench.answers import tables
from entrain_bench.answers.labels import names
from entrain_bench.answers.text import count
from entrain_bench.figures import _style as style
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results

EXPERIMENT = "sensitivity"
RUNS = True
# Relative times up to this are as good as the best split.
CLOSE = 1.01
CHOSEN: dict[str, Any] = {"markersize": 6.5, "mec": style.INK, "mew": 0.9}
STATE = ["encoder_stages", "num_runs", "num_ok", "status", "reason"]
COLUMNS = [*tables.JOB, *STATE, "iteration_time_s", "relative", "relative_low", "relative_high", "planned"]


def load(cells: Sequence[Cell], results: Results) -> pd.DataFrame:
    """The table of the sweep's runs; ``forced_stages`` is empty where the planner chose."""
    table = tables.run_table(cells, results, {"forced_stages": "strategy.planner.encoder_stages"})
    chosen = {cell.key: tables.encoder_stages_and_gpus(cell, results.read(cell.key))[0] for cell in cells}
    return table.assign(encoder_stages=table["forced_stages"].fillna(table["key"].map(chosen)))


def draw(data: pd.DataFrame) -> style.Picture:
    """A panel a model, a line a trace."""
    models = names(data, "model")
    traces = names(data, "workload")
    colours = style.palette(traces)
    table = relative_times(data)
    figure, axes = style.panels(1, len(models), style.DOUBLE_COLUMN_IN, 2.2, sharey=True)
    for panel, model in zip(axes, models, strict=True):
        rows = table[table["model"] == model]
        style.draw_lines(panel, rows, "encoder_stages", "relative", "workload", colours, traces)
        for trace, marker in style.marker_of(traces).items():
            planned = rows[rows["planned"] & (rows["workload"] == trace)]
            panel.plot(planned["encoder_stages"], planned["relative"], marker, **CHOSEN, mfc=colours[trace], zorder=3)
        panel.set(title=models[model], xlabel="Pipeline stages of the encoder")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].set_ylim(bottom=0.95)
    axes[0].set_ylabel("Iteration time,\nrelative to the best split")
    handle = Line2D([], [], marker="o", mfc="white", linestyle="", label="the planner's own split", **CHOSEN)
    style.legend_above(figure, [*style.line_handles(colours, traces), handle])
    taken = table[table["planned"]].groupby(tables.JOB)["relative"].min().dropna()
    jobs = count(len(taken), "job")
    behind = f", and at most {100 * (taken.max() - 1):.0f}% slower on the others" if len(taken) else ""
    message = f"The planner's own split is within 1% of the best on {(taken <= CLOSE).sum()} of {jobs}{behind}."
    return style.Picture(figure, table[COLUMNS], message + tables.lacking(table, traces, by="workload"))


def relative_times(data: pd.DataFrame) -> pd.DataFrame:
    """Mean iteration times of the forced splits over seeds, and their ratios to the best split of model and trace."""
    keys = [*tables.JOB, "encoder_stages"]
    forced = data[data["forced_stages"].notna()].astype({"encoder_stages": int})
    table = tables.interval_over_seeds(forced, keys, "iteration_time_s")
    best = table.sort_values("iteration_time_s", kind="stable").drop_duplicates(tables.JOB)[keys]
    ratios = tables.relative_over_seeds(forced, forced.merge(best, on=keys), keys, tables.JOB)
    free = data[data["forced_stages"].isna() & data["encoder_stages"].notna()]
    chosen = set(free[keys].astype({"encoder_stages": int}).itertuples(index=False, name=None))
    planned = [case in chosen for case in table[keys].itertuples(index=False, name=None)]
    return table.join(ratios, on=keys).assign(planned=planned)
