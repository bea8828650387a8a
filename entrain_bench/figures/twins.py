"""Speedup over the baseline on a trace and on its synthetic counterpart, and rank correlation between both.

Cells of ``experiments/figure/twins.yaml``, in the setting of arXiv:2605.27918, section 7. A twin (``workload=twin``)
has a trace's marginals and rank correlations and no sample of it. Tau is Kendall's over strategies that run on both.
"""

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import pandas as pd
import seaborn as sns

from entrain_bench.answers.labels import names
from entrain_bench.answers.tables import run_table
from entrain_bench.answers.text import count
from entrain_bench.answers.twins import SIDES, TRACE, TWIN, labels_of_traces, speedups
from entrain_bench.figures._forms import handles, marker_of
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, INK, Picture, legend_above, panels, system_colours
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results

EXPERIMENT = "twins"
RUNS = True
SETTINGS = {"path": "workload.path", "kind": "workload._target_"}


def load(cells: Sequence[Cell], results: Results) -> pd.DataFrame:
    """The table of the sweep's runs; ``trace`` is the trace's name and ``side`` whether a run is of it or its twin."""
    table = run_table(cells, results, SETTINGS)
    sides = [TWIN if str(kind).endswith("TwinWorkload") else TRACE for kind in table["kind"]]
    return table.assign(trace=[PurePath(str(path)).stem for path in table["path"]], side=sides)


def draw(data: pd.DataFrame) -> Picture:
    """A panel a trace, a point a strategy; on the dashed line a strategy gains the same on both."""
    table = speedups(data)
    traces = labels_of_traces([*data["trace"].unique()])
    strategies = {name: label for name, label in names(data, "strategy").items() if name in set(table["strategy"])}
    colours = {name: colour for name, colour in system_colours(data).items() if name in strategies}
    look: dict[str, Any] = {"palette": colours, "markers": marker_of(strategies), "legend": False, "s": 24}
    figure, axes = panels(1, len(traces), DOUBLE_COLUMN_IN, 2.1)
    for panel, (trace, label) in zip(axes, traces.items(), strict=True):
        rows = table[table["trace"] == trace]
        both = rows[["trace_speedup", "twin_speedup"]].to_numpy()
        margin = 0.08 * (both.max() - both.min() or 1.0)
        ends = (both.min() - margin, both.max() + margin)
        panel.axline((1, 1), slope=1, color=INK, linewidth=0.7, linestyle="--", zorder=1)
        sns.scatterplot(rows, x="trace_speedup", y="twin_speedup", hue="strategy", style="strategy", ax=panel, **look)
        panel.set(xlim=ends, ylim=ends, xlabel="speedup on the trace", ylabel="")
        panel.locator_params(nbins=4)
        panel.set_title(f"{label} (tau {rows['tau'].iloc[0]:.2f})")
    axes[0].set_ylabel("speedup on its twin")
    legend_above(figure, handles(colours, strategies, line=""))
    taus = table.groupby(["model", "trace"])["tau"].first()
    extremes = dict.fromkeys(f"{tau:.2f}" for tau in (taus.min(), taus.max()))
    said = f"rank correlation {' to '.join(extremes)} on {count(len(taus), 'trace')}"
    sides = [table.assign(side=side, speedup=table[f"{side}_speedup"]) for side in SIDES]
    shown = pd.concat(sides, ignore_index=True)[["model", "trace", "strategy", "side", "speedup", "tau"]]
    return Picture(figure, shown, f"Synthetic twins and their traces rank strategies similarly: {said}.")
