"""Forward time of the microbatches, and its standard deviation, by strategy, trace and model.

Corresponds to arXiv:2605.27918, Figure 15 and Table 3; cells of ``experiments/figure/systems.yaml``. A forward time is
summed over the stages of the encoders or of the LLM. Boxes: all microbatches of all replicas in the first iteration of
the first seed; whiskers from 5% to 95%. Bottom: the runs' metric (per replica, averaged over replicas and iterations),
mean over seeds with its 95% interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from entrain_bench.answers.tables import Runs, interval_over_seeds, run_actions, run_table
from entrain_bench.figures._bars import Grid, mark_gap
from entrain_bench.figures._ranked import range_of
from entrain_bench.figures._style import (
    DOUBLE_COLUMN_IN,
    GRID,
    INK,
    NUMBER_FORMAT,
    legend_above,
    lighter,
    marker_of,
    say,
    split,
    strategy_handles,
)
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results

EXPERIMENT = "systems"
RUNS = True
TIMELINES = True
SIDES = {"encoder": "Encoder", "llm": "LLM"}
CASE = ["workload", "model", "strategy"]
BOX = [*CASE, "side"]
ACTION = ["module", "stage", "replica", "microbatch", "part"]
BOX_PERCENT = (5, 25, 50, 75, 95)
BOX_ENDS = ("whislo", "q1", "med", "q3", "whishi")
# How far a whisker reaches down at most: a logarithmic axis has no 0.
MOST_BELOW = 10
# An axis from a value to less than so many times as much would have one power of ten, or none.
FEW_DECADES = 100
# Distance between two traces at the bottom, in models.
TRACE_GAP = 0.6


def load(cells: Sequence[Cell], results: Results) -> Runs:
    """The table of the sweep's runs and the timelines of the first seed."""
    return Runs(run_table(cells, results), run_actions(cells, results))


def draw(data: Runs) -> tuple[Figure, pd.DataFrame]:
    """Top: a panel for every side and trace, a box a strategy. Bottom: standard deviations on a logarithmic axis."""
    grid = Grid.of(data.table)
    forward = microbatch_forward(data.actions)
    spread = forward_std(data.table)
    figure = Figure(figsize=(DOUBLE_COLUMN_IN, 5.0), layout="constrained")
    boxes, dots = split(figure, heights=[1.75, 1.0])
    axes = boxes.subplots(len(SIDES), len(grid.workloads), squeeze=False, sharex=True)
    for side, row in zip(SIDES, axes, strict=True):
        for workload, panel in zip(grid.workloads, row, strict=True):
            mine = forward[(forward["side"] == side) & (forward["workload"] == workload)]
            _draw_boxes(panel, box_quantiles(mine), grid, data.table, workload)
            if side == next(iter(SIDES)):
                panel.set_title(grid.workloads[workload])
        row[0].set_ylabel(f"{SIDES[side]} forward (ms),\nall replicas")
    for side, panel in zip(SIDES, dots.subplots(1, len(SIDES), sharey=True), strict=True):
        _draw_std(panel, spread[spread["side"] == side], grid)
        panel.set_title(f"{SIDES[side]}: std over the microbatches of a replica")
    dots.axes[0].set_ylabel("Standard deviation (ms)")
    markers: list[Artist] = [
        Line2D([], [], color=INK, marker=marker, markersize=3.5, linestyle="", label=grid.models[model])
        for model, marker in marker_of(grid.models).items()
    ]
    legend_above(figure, [*strategy_handles(grid.colours, grid.strategies), *markers])
    llm = range_of(data.table, spread[spread["side"] == "llm"], "std_ms", "{:.3g} ms")
    say(figure, f"Standard deviation of the LLM's forward time: {llm}.")
    return figure, box_quantiles(forward).merge(spread, on=BOX, how="outer", sort=False)


def microbatch_forward(actions: pd.DataFrame) -> pd.DataFrame:
    """Forward time of every microbatch, summed over modules of a side, stages and parts: ``forward_ms`` by case.

    Sub-microbatches count as the microbatch that they are parts of.
    """
    keys = [*CASE, "side", "replica", "microbatch"]
    if actions.empty:
        return pd.DataFrame(columns=[*keys, "forward_ms"])
    # An action that occupies several lanes has a row for each.
    forward = actions[actions["pass"].eq("forward")].drop_duplicates([*CASE, *ACTION])
    milliseconds = 1e3 * (forward["end_s"] - forward["start_s"])
    forward = forward.assign(microbatch=forward["parent"])
    return forward[keys].assign(forward_ms=milliseconds).groupby(keys, sort=False)["forward_ms"].sum().reset_index()


def box_quantiles(forward: pd.DataFrame) -> pd.DataFrame:
    """Return quantiles of ``microbatch_forward`` for boxes and whiskers, ``forward_p5_ms`` to ``forward_p95_ms``."""
    groups = forward.astype({"forward_ms": float}).groupby(BOX, sort=False)["forward_ms"]
    return pd.DataFrame({f"forward_p{p}_ms": groups.quantile(p / 100) for p in BOX_PERCENT}).reset_index()


def forward_std(table: pd.DataFrame) -> pd.DataFrame:
    """The metrics ``<side>_forward_std_ms`` as ``std_ms`` with its interval, over the seeds that succeeded."""
    sides = []
    for side in SIDES:
        means = interval_over_seeds(table, CASE, metric := f"{side}_forward_std_ms")
        means.columns = means.columns.str.replace(metric, "std_ms")
        sides.append(means[means["num_ok"] > 0].assign(side=side)[[*BOX, "std_ms", "std_ms_low", "std_ms_high"]])
    return pd.concat(sides, ignore_index=True)


def _draw_boxes(panel: Axes, quantiles: pd.DataFrame, grid: Grid, table: pd.DataFrame, workload: str) -> None:
    groups = quantiles.set_index(["model", "strategy"]).to_dict("index")
    for model, strategy, position in grid.places():
        if (model, strategy) not in groups:
            runs = table[(table["workload"] == workload) & (table["model"] == model) & (table["strategy"] == strategy)]
            status = "missing" if runs.empty else runs["status"].iloc[0]
            mark_gap(panel, position, grid.width, "no timeline" if status == "ok" else status)
            continue
        colour = grid.colours[strategy]
        ends = dict(zip(BOX_ENDS, (groups[model, strategy][f"forward_p{p}_ms"] for p in BOX_PERCENT), strict=True))
        panel.bxp(
            [ends],
            positions=[position],
            widths=0.75 * grid.width,
            patch_artist=True,
            manage_ticks=False,
            # One sample would lift the axis above all boxes.
            showfliers=False,
            boxprops={"facecolor": lighter(colour), "edgecolor": colour, "linewidth": 0.8},
            whiskerprops={"color": colour, "linewidth": 0.8},
            capprops={"color": colour, "linewidth": 0.8},
            medianprops={"color": INK, "linewidth": 1.0},
        )
    _label_logarithms(panel)
    grid.label_models(panel)


def _draw_std(panel: Axes, spread: pd.DataFrame, grid: Grid) -> None:
    """Traces along x, within them models, within them strategies."""
    ticks = []
    markers = marker_of(grid.models)
    values = spread.set_index(CASE).to_dict("index")
    for place, workload in enumerate(grid.workloads):
        start = place * (len(grid.models) + TRACE_GAP)
        if place:
            panel.axvline(start - 0.5 - TRACE_GAP / 2, color=GRID, linewidth=0.4)
        for model, strategy, position in grid.places():
            row = values.get((workload, model, strategy))
            if row is None:
                mark_gap(panel, start + position, grid.width, "")
            elif row["std_ms"] == 0:  # has no place on a logarithmic axis
                edge: Any = {"transform": panel.get_xaxis_transform(), "ha": "center", "va": "bottom"}
                panel.text(start + position, 0.01, "0", color=grid.colours[strategy], **edge)
            else:
                ends = max(row["std_ms_low"], row["std_ms"] / MOST_BELOW), row["std_ms_high"]
                panel.vlines(start + position, *ends, color=grid.colours[strategy], linewidth=0.7)
                mark: Any = {"marker": markers[model], "color": grid.colours[strategy], "ec": "white", "lw": 0.3}
                panel.scatter(start + position, row["std_ms"], 12, zorder=2, **mark)
        ticks.append(start + (len(grid.models) - 1) / 2)
    _label_logarithms(panel)
    panel.set_xticks(ticks, list(grid.workloads.values()))
    panel.tick_params(axis="x", length=0)
    panel.grid(visible=False, axis="x")


def _label_logarithms(panel: Axes) -> None:
    """A logarithmic y axis with more than one label, without powers."""
    panel.set_yscale("log")
    low, high = panel.get_ylim()
    if high < FEW_DECADES * low:
        panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=20))
    panel.yaxis.set_major_formatter(NUMBER_FORMAT)
    panel.yaxis.set_minor_locator(NullLocator())
