"""Speedup of available balancers over arrival order, at several pipeline depths.

No figure of a paper: arXiv:2511.00279, pull requests and training scripts each measure one of them on a stack of their
own. Rows of ``experiments/figure/out_of_the_box.yaml`` are stacks, a panel each; the first strategy is what the others
are compared with, on the same stack, trace and seed. Numbers are geometric means over seeds; a star marks missing
seeds, a question mark 95% intervals that include 1. White cells have no result, or nothing to be compared with (n/a).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.colors import LogNorm

from entrain_bench.answers.labels import names
from entrain_bench.figures._forms import ROW_IN, heatmap
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, Picture, panels, show_reason
from entrain_bench.figures._tables import gain_text, run_tables, speedup_table

EXPERIMENT = "out_of_the_box"
RUNS = True
CASE = ["row", "model", "workload", "strategy"]
# Cells without a result, by the state of the runs; those that are ok have nothing to be compared with.
WORDS = {"failed": "fails", "skipped": "-", "missing": "not run", "ok": "n/a"}
# Speedups at which colours end.
EXTREME = 1.6
load = run_tables


def draw(data: pd.DataFrame) -> Picture:
    """A panel a stack and model; balancers from top to bottom, traces side by side."""
    strategies, traces, models = (names(data, column) for column in ("strategy", "workload", "model"))
    table = gains(data)
    balancers = [*strategies][1:]
    table["text"] = [gain_text(row, WORDS) for row in table.to_dict("records")]
    places = [(model, stack) for model in models for stack in data["row"].unique()]
    columns = len(places) // len(models)
    height_in = 0.65 + len(models) * (0.3 + ROW_IN * max(3, len(balancers)))
    figure, axes = panels(len(models), columns, DOUBLE_COLUMN_IN, height_in, sharey=True)
    shades: dict[str, Any] = {"norm": LogNorm(1 / EXTREME, EXTREME), "cmap": "vlag_r"}
    for panel, (model, stack) in zip(axes, places, strict=True):
        mine = table[(table["row"] == stack) & (table["model"] == model)]
        values, texts = (
            mine.pivot(index="strategy", columns="workload", values=name)
            .reindex(index=balancers, columns=[*traces])
            .rename(index=strategies, columns=traces)
            for name in ("speedup", "text")
        )
        if values.empty:
            show_reason(panel, "nothing to compare")
        else:
            heatmap(panel, values, texts.fillna(""), **shades)
        panel.set_title(f"{models[model]}, {stack}" if len(models) > 1 else stack)
    first = next(iter(strategies.values()))
    figure.supxlabel(f"Speedup over {first}")
    return Picture(figure, table.drop(columns="text"), _message(table, balancers, strategies, traces))


def gains(data: pd.DataFrame) -> pd.DataFrame:
    """Mean iteration times with ``speedup`` over the first strategy on the same stack."""
    first = data[data["strategy"] == data["strategy"].iloc[0]]
    return speedup_table(data, first, CASE, CASE[:-1])


def _message(
    table: pd.DataFrame, balancers: list[str], strategies: Mapping[str, str], traces: Mapping[str, str]
) -> str:
    mine = table[table["strategy"].isin(balancers) & table["speedup"].notna()]
    if mine.empty:
        return "No balancer has a result that can be compared."
    best = mine.sort_values("speedup", ascending=False, kind="stable").to_dict("records")[0]
    several = mine["num_ok"] > 1
    faster = (several & (mine["speedup_low"] > 1)).sum()
    slower = (several & (mine["speedup_high"] < 1)).sum()
    return (
        f"Of {len(mine)} combinations of balancer, trace and stack, {faster} are significantly faster and {slower} "
        f"slower than {next(iter(strategies.values()))}; at most {best['speedup']:.2f}x "
        f"({strategies[best['strategy']]}, {traces[best['workload']]}, {best['row']})."
    )
