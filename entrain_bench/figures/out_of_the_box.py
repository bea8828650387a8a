"""Speedup of available balancers over arrival order, at several pipeline depths.

No figure of a paper: arXiv:2511.00279, pull requests and training scripts each measure one of them on a stack of their
own. Rows of ``experiments/figure/out_of_the_box.yaml`` are stacks, a column of panels each; the first strategy is what
the others are compared with, on the same stack, trace and seed. Marks are geometric means over seeds, lines their 95%
intervals, pale where they include 1; hollow marks lack seeds.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from entrain_bench.answers.tables import interval_over_seeds
from entrain_bench.figures._bars import Grid, run_tables, speedup_over
from entrain_bench.figures._style import (
    FAINT,
    INK,
    Colour,
    facets,
    legend_above,
    lighter,
    marker_of,
    palette,
    say,
    show_reason,
)

EXPERIMENT = "out_of_the_box"
RUNS = True
CASE = ["row", "model", "workload", "strategy"]
# Height of a trace of a strategy, of the gap between two strategies, and of what is above and below the panels.
TRACE_IN = 0.11
GAP_IN = 0.1
HEAD_IN = 1.0
MARK = 3.6
# What stands in the place of a mark, by the state of the runs; those that are ok have nothing to be compared with.
WORDS = {"failed": "fails", "skipped": "incompatible", "missing": "not run", "ok": "no reference"}
NO_CELL = "no cell"
load = run_tables


def draw(data: pd.DataFrame) -> tuple[Figure, pd.DataFrame]:
    """A column of panels a stack, a row a model; balancers from top to bottom, a mark a trace."""
    grid = Grid.of(data)
    table = gains(data)
    stacks = [*map(str, data["row"].unique())]
    colours = palette(grid.workloads)
    balancers = [*grid.strategies][1:]
    step_in = TRACE_IN * len(grid.workloads) + GAP_IN
    height_in = HEAD_IN + len(grid.models) * (0.25 + step_in * max(1, len(balancers)))
    figure, axes = facets([*grid.models], stacks, height_in, sharex=True, sharey=True)
    for model, stack, panel in axes:
        mine = table[(table["row"] == stack) & (table["model"] == model)]
        _draw_stack(panel, mine, balancers, grid, colours)
        several = f"{grid.models[model]}, " if len(grid.models) > 1 else ""
        panel.set_title(f"{several}{stack}")
    figure.supxlabel(f"Speedup over {next(iter(grid.strategies.values()))}", fontsize="medium")
    style: dict[str, Any] = {"markersize": MARK, "linewidth": 0.9}
    handles = [
        Line2D([], [], color=colours[name], marker=marker, label=grid.workloads[name], **style)
        for name, marker in marker_of(grid.workloads).items()
    ]
    handles.append(Line2D([], [], color=FAINT, marker="o", label="pale: interval includes 1", **style))
    if (table["num_ok"].between(1, table["num_runs"] - 1)).any():
        hollow = style | {"mfc": "white", "linestyle": ""}
        handles.append(Line2D([], [], color=FAINT, marker="o", label="hollow: some seeds fail", **hollow))
    legend_above(figure, handles)
    say(figure, _message(table, balancers, grid))
    return figure, table


def gains(data: pd.DataFrame) -> pd.DataFrame:
    """Mean iteration times by stack, model, trace and strategy, with ``speedup`` over the first strategy's."""
    table = interval_over_seeds(data, CASE, "iteration_time_s")
    first = data[data["strategy"] == data["strategy"].iloc[0]]
    return table.join(speedup_over(first, data, CASE, CASE[:3]), on=CASE)


def _word(row: Mapping[Hashable, Any] | None) -> str:
    """Text in place of a mark; empty if there is a mark."""
    if row is None:
        return NO_CELL
    return WORDS[str(row["status"])] if pd.isna(row["speedup"]) else ""


def _message(table: pd.DataFrame, balancers: Sequence[str], grid: Grid) -> str:
    """The greatest speedup, and in how many places it is significantly above and below 1."""
    mine = table[table["strategy"].isin(balancers) & table["speedup"].notna()]
    if mine.empty:
        return "No balancer has a result that can be compared."
    best = mine.sort_values("speedup", ascending=False, kind="stable").to_dict("records")[0]
    several = mine["num_ok"] > 1
    faster = (several & (mine["speedup_low"] > 1)).sum()
    slower = (several & (mine["speedup_high"] < 1)).sum()
    return (
        f"Of {len(mine)} combinations of balancer, trace and stack, {faster} are significantly faster and {slower} "
        f"slower than {next(iter(grid.strategies.values()))}; at most {best['speedup']:.2f}x "
        f"({grid.strategies[best['strategy']]}, {grid.workloads[best['workload']]}, {best['row']})."
    )


def _draw_stack(
    panel: Axes, table: pd.DataFrame, balancers: Sequence[str], grid: Grid, colours: Mapping[str, Colour]
) -> None:
    if not balancers:
        show_reason(panel, "nothing to compare")
        return
    rows = {(row["strategy"], row["workload"]): row for row in table.to_dict("records")}
    panel.axvline(1.0, color=INK, linewidth=0.8, zorder=1)
    beside = panel.get_yaxis_transform()
    share = TRACE_IN / (TRACE_IN * len(grid.workloads) + GAP_IN)
    for place, strategy in enumerate(balancers):
        texts = {workload: _word(rows.get((strategy, workload))) for workload in grid.workloads}
        clear: dict[str, Any] = {"facecolor": "white", "edgecolor": "none"}
        if len({*texts.values()}) == 1 and (word := texts[next(iter(texts))]):
            look: dict[str, Any] = {"va": "center_baseline", "color": FAINT, "bbox": {**clear, "pad": 1.0}}
            panel.text(0.02, place, word, transform=beside, **look)
            continue
        for step, (workload, marker) in enumerate(marker_of(grid.workloads).items()):
            height = place + share * (step - (len(grid.workloads) - 1) / 2)
            if texts[workload]:
                look = {"va": "center_baseline", "color": colours[workload], "bbox": {**clear, "pad": 0.2}}
                panel.text(0.02, height, texts[workload], transform=beside, **look)
                continue
            row = rows[strategy, workload]
            firm = row["num_ok"] > 1 and not row["speedup_low"] < 1 < row["speedup_high"]
            colour = colours[workload] if firm else lighter(colours[workload], 0.35)
            panel.hlines(height, row["speedup_low"], row["speedup_high"], color=colour, linewidth=0.9, zorder=2)
            mark: dict[str, Any] = {"markersize": MARK, "mec": "white", "mew": 0.3}
            if row["num_ok"] < row["num_runs"]:
                mark = {"markersize": MARK - 0.6, "mfc": "white", "mec": colour, "mew": 0.8}
            panel.plot(row["speedup"], height, marker, color=colour, zorder=3, **mark)
    panel.set_yticks(range(len(balancers)), [grid.strategies[name] for name in balancers])
    panel.set_ylim(len(balancers) - 0.5, -0.5)
    panel.set_yticks([place - 0.5 for place in range(1, len(balancers))], minor=True)
    panel.grid(visible=False, axis="y")
    panel.grid(visible=True, axis="y", which="minor")
    panel.tick_params(axis="y", length=0)
    panel.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
