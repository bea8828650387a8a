"""Speedup over the baseline on a trace and on its synthetic counterpart, and rank correlation between both.

Cells of ``experiments/figure/twins.yaml``, in the setting of arXiv:2605.27918, section 7. A twin (``workload=twin``)
has a trace's marginals and rank correlations and no sample of it. Tau is Kendall's over the
strategies that run on both.
"""

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import pandas as pd
import seaborn as sns
import yaml

from entrain_bench.answers.labels import distinct_labels, names
from entrain_bench.answers.statistics import kendall_tau
from entrain_bench.answers.tables import run_table
from entrain_bench.answers.text import count
from entrain_bench.config.tree import choices, config_tree
from entrain_bench.figures import _style as style
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results

EXPERIMENT = "twins"
RUNS = True
SETTINGS = {"path": "workload.path", "kind": "workload._target_"}
SIDES = TRACE, TWIN = "trace", "twin"
COLUMNS = ["model", "trace", "strategy", "side", "speedup", "tau"]


def load(cells: Sequence[Cell], results: Results) -> pd.DataFrame:
    """The table of the sweep's runs; ``trace`` is the trace's name and ``side`` whether a run is of it or its twin."""
    table = run_table(cells, results, SETTINGS)
    sides = [TWIN if str(kind).endswith("TwinWorkload") else TRACE for kind in table["kind"]]
    return table.assign(trace=[PurePath(str(path)).stem for path in table["path"]], side=sides)


def draw(data: pd.DataFrame) -> style.Picture:
    """A panel a trace, a point a strategy; on the dashed line a strategy gains the same on both."""
    table = speedups(data)
    traces = labels_of_traces([*data["trace"].unique()])
    strategies = {name: label for name, label in names(data, "strategy").items() if name in set(table["strategy"])}
    colours = {name: colour for name, colour in style.system_colours(data).items() if name in strategies}
    look: dict[str, Any] = {"palette": colours, "markers": style.marker_of(strategies), "legend": False, "s": 24}
    figure, axes = style.panels(1, len(traces), style.DOUBLE_COLUMN_IN, 2.1)
    for panel, (trace, label) in zip(axes, traces.items(), strict=True):
        rows = table[table["trace"] == trace]
        both = rows[["trace_speedup", "twin_speedup"]].to_numpy()
        margin = 0.08 * (both.max() - both.min() or 1.0)
        ends = (both.min() - margin, both.max() + margin)
        panel.axline((1, 1), slope=1, color=style.INK, linewidth=0.7, linestyle="--", zorder=1)
        sns.scatterplot(rows, x="trace_speedup", y="twin_speedup", hue="strategy", style="strategy", ax=panel, **look)
        panel.set(xlim=ends, ylim=ends, xlabel="Speedup on the trace", ylabel="")
        panel.set_title(f"{label} (tau {rows['tau'].iloc[0]:.2f})")
    axes[0].set_ylabel("Speedup on its twin")
    style.legend_above(figure, style.line_handles(colours, strategies, line=""))
    taus = table.groupby(["model", "trace"])["tau"].first()
    extremes = dict.fromkeys(f"{tau:.2f}" for tau in (taus.min(), taus.max()))
    said = f"rank correlation {' to '.join(extremes)} on {count(len(taus), 'trace')}"
    sides = [table.assign(side=side, speedup=table[f"{side}_speedup"]) for side in SIDES]
    shown = pd.concat(sides, ignore_index=True)[COLUMNS]
    return style.Picture(figure, shown, f"Synthetic twins and their traces rank strategies similarly: {said}.")


def labels_of_traces(traces: Sequence[str]) -> dict[str, str]:
    """Label of every trace: that of a workload that reads its file, else from its name."""
    stated: dict[str, str] = {}
    for name in choices("workload"):
        values = yaml.safe_load((config_tree() / "workload" / f"{name}.yaml").read_text())
        if values.keys() >= {"path", "label"}:
            stated.setdefault(PurePath(str(values["path"])).stem, str(values["label"]))
    return {trace: stated.get(trace, label) for trace, label in distinct_labels(traces).items()}


def speedups(data: pd.DataFrame) -> pd.DataFrame:
    """Speedup over the first strategy on each trace and its twin, and Kendall's tau of every trace.

    Means over the seeds at which a strategy and the first one both have a result.
    """
    good = data[data["status"] == "ok"]
    seconds = good.pivot_table("iteration_time_s", ["model", "trace", "strategy"], ["side", "seed"], sort=False)
    parts = []
    for _, rows in seconds.groupby(level=["model", "trace"], sort=False):
        by_seed = rows.iloc[0] / rows
        means = {side: pd.DataFrame(by_seed[side]).mean(axis="columns") for side in SIDES if side in by_seed}
        gains = pd.DataFrame(means, rows.index).reindex(columns=[*SIDES]).dropna()
        tau = kendall_tau(gains[TRACE].tolist(), gains[TWIN].tolist())
        parts.append(gains.rename(columns={side: f"{side}_speedup" for side in SIDES}).assign(tau=tau))
    return pd.concat(parts).reset_index()
