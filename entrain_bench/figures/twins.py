"""Speedup over the baseline on a trace and on its synthetic counterpart, and rank correlation between both.

Cells of ``experiments/figure/twins.yaml``, in the setting of arXiv:2605.27918, section 7. A twin (``workload=twin``)
has a trace's marginals and rank correlations and no sample of it. Tau is Kendall's over the
strategies that run on both.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

import numpy as np
import pandas as pd
import yaml
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy import stats

from entrain_bench.answers.labels import distinct_labels, names, orders
from entrain_bench.answers.tables import run_table
from entrain_bench.answers.text import count
from entrain_bench.config.tree import choices, config_tree
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, INK, legend_above, marker_of, panels, say, strategy_colours
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results

EXPERIMENT = "twins"
RUNS = True
SETTINGS = {"path": "workload.path", "kind": "workload._target_"}
# A cap on images makes another workload of a trace.
IMAGES = "max_image_tokens"
SIDES = TRACE, TWIN = "trace", "twin"
COLUMNS = ["model", "trace", "strategy", "side", "speedup", "tau"]


def load(cells: Sequence[Cell], results: Results) -> pd.DataFrame:
    """The table of the sweep's runs; ``trace`` is the trace's name and ``side`` whether a run is of it or its twin."""
    table = run_table(cells, results, SETTINGS)
    labels = stated_labels()
    return table.assign(
        trace_label=[labels.get(str(path), "") for path in table["path"]],
        trace=[PurePath(str(path)).stem for path in table["path"]],
        side=[TWIN if str(kind).endswith("TwinWorkload") else TRACE for kind in table["kind"]],
    )


def draw(data: pd.DataFrame) -> tuple[Figure, pd.DataFrame]:
    """A panel a trace, a point a strategy; on the dashed line a strategy gains the same on both."""
    table = speedups(data)
    traces = labels_of(data)
    strategies = names(data, "strategy")
    colours = strategy_colours(orders(data))
    figure, axes = panels(1, len(traces), DOUBLE_COLUMN_IN, 2.1)
    markers = marker_of(strategies)
    for panel, trace in zip(axes, traces, strict=True):
        rows = table[table["trace"] == trace]
        both = rows[["trace_speedup", "twin_speedup"]].to_numpy()
        margin = 0.08 * (both.max() - both.min() or 1.0)
        ends = [both.min() - margin, both.max() + margin]
        panel.plot(ends, ends, color=INK, linewidth=0.7, linestyle="--", zorder=1)
        panel.set(xlim=ends, ylim=ends)
        for name in rows["strategy"]:
            place = rows.loc[rows["strategy"] == name, ["trace_speedup", "twin_speedup"]].to_numpy()
            panel.plot(*place.T, markers[name], color=colours[name], markersize=5, zorder=3)
        panel.set_title(f"{traces[trace]} (tau {rows['tau'].iloc[0]:.2f})")
        panel.set_xlabel("Speedup on the trace")
    axes[0].set_ylabel("Speedup on its twin")
    handles = [
        Line2D([], [], marker=markers[name], color=colours[name], linestyle="", label=label)
        for name, label in strategies.items()
        if name in set(table["strategy"])
    ]
    legend_above(figure, handles)
    taus = table.groupby(["model", "trace"])["tau"].first()
    extremes = dict.fromkeys(f"{tau:.2f}" for tau in (taus.min(), taus.max()))
    said = f"rank correlation {' to '.join(extremes)} on {count(len(taus), 'trace')}"
    say(figure, f"Synthetic twins and their traces rank strategies similarly: {said}.")
    sides = [table.assign(side=side, speedup=table[f"{side}_speedup"]) for side in SIDES]
    return figure, pd.concat(sides, ignore_index=True)[COLUMNS]


def stated_labels() -> dict[str, str]:
    """The labels of our workloads by the file that they read as it is, with images as large as in ``trace.yaml``."""
    found = {}
    usual = yaml.safe_load((config_tree() / "workload" / "trace.yaml").read_text())[IMAGES]
    for name in choices("workload"):
        values = yaml.safe_load((config_tree() / "workload" / f"{name}.yaml").read_text())
        if values.keys() >= {"path", "label"} and "text" not in values and values.get(IMAGES, usual) == usual:
            found[str(values["path"])] = str(values["label"])
    return found


def labels_of(data: pd.DataFrame) -> dict[str, str]:
    """A label for each trace: as stated, else the first word of its name if that tells the traces apart."""
    first = {trace: trace.partition("_")[0] for trace in data["trace"].unique()}
    labels = distinct_labels(first.values() if len(set(first.values())) == len(first) else first)
    stated = data.drop_duplicates("trace").set_index("trace")["trace_label"]
    return {trace: stated[trace] or labels.get(word) or labels[trace] for trace, word in first.items()}


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
        tau = float(stats.kendalltau(gains[TRACE], gains[TWIN]).statistic) if len(gains) > 1 else np.nan
        parts.append(gains.rename(columns={side: f"{side}_speedup" for side in SIDES}).assign(tau=tau))
    return pd.concat(parts).reset_index()
