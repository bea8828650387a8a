"""GPU-time breakdown of an iteration under every strategy: ideal work, and all other time by its cause.

No figure of a paper: arXiv:2605.27918, Figure 6, has the idle share alone. Cells of
``experiments/figure/iteration_time.yaml``. Every second of every GPU is in one class (docs/metrics.md), so a bar is
100%; segments are means over the seeds that have a result. The number is the share of ideal work, by which strategies
with the same samples on the same cluster are as fast as they are.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from entrain_bench.answers.labels import FAMILIES, families
from entrain_bench.answers.tables import over_seeds, run_table
from entrain_bench.answers.text import TIME_WORDS
from entrain_bench.figures._bars import Grid
from entrain_bench.figures._ranked import range_of
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, FAINT, legend_above, panels, say
from entrain_bench.records.time_shares import TIME_SHARES

EXPERIMENT = "iteration_time"
RUNS = True
CASE = ["model", "workload", "strategy"]
load = run_table
MAX_COLUMNS = 5
# Height of a strategy, of a panel's title and axis, and of what is above all panels.
BAR_IN = 0.128
PANEL_IN = 0.32
HEAD_IN = 1.0
# Share of a panel's width that a digit takes.
DIGIT = 0.085


# Computation is blue, communication yellow, unequal load red, what remains grey; white is hatched.
COLOURS = ["#123c69", "#5b8fc0", "#b9d3ea", "#e8b02f", "#7f1d1d", "#cf4a3c", "#f3a08c", "#bdbdbd", "#757575", "#ffffff"]
HATCHES = {"#ffffff": "//////"}
LOOKS = dict(zip(TIME_SHARES, COLOURS, strict=True))


def draw(data: pd.DataFrame) -> tuple[Figure, pd.DataFrame]:
    """A panel a trace and model, traces side by side; a bar a strategy, those of a family together."""
    grid = Grid.of(data)
    table = over_seeds(data, CASE, **{name: (name, "mean") for name in TIME_SHARES})
    rows = {tuple(row[name] for name in CASE): row for row in table.to_dict("records")}
    strategies = by_family(data)
    wide = -(-len(grid.workloads) // -(-len(grid.workloads) // MAX_COLUMNS))
    deep = -(-len(grid.workloads) // wide)
    height_in = HEAD_IN + len(grid.models) * deep * (PANEL_IN + BAR_IN * (max(strategies.values()) + 1.0))
    figure, axes = panels(len(grid.models) * deep, wide, DOUBLE_COLUMN_IN, height_in, sharex=True, sharey=True)
    places = [(model, workload) for model in grid.models for workload in [*grid.workloads, *[""] * wide][: deep * wide]]
    for place, (panel, (model, workload)) in enumerate(zip(axes, places, strict=True)):
        if not workload:
            panel.set_visible(False)
            continue
        _draw_panel(panel, {name: rows.get((model, workload, name)) for name in grid.strategies}, strategies, grid)
        panel.set_title(grid.workloads[workload])
        if len(grid.models) > 1 and place % wide == wide - 1:
            panel.yaxis.set_label_position("right")
            panel.set_ylabel(grid.models[model], rotation=270, va="bottom", fontsize="large")
    figure.supxlabel("Share of GPU time (%)", fontsize="medium")
    legend_above(figure, _handles(table))
    say(figure, f"Ideal work in GPU time: {range_of(data, table, TIME_SHARES[0], '{:.0%}')}.")
    return figure, table


def by_family(data: pd.DataFrame) -> dict[str, float]:
    """Position of every strategy from the top: in the order of the table, half a bar between families."""
    # The first is what the others are compared with, beside the family that follows.
    (first, _), *others = families(data).items()
    present = {family for _, family in others}
    groups = [family for family in FAMILIES if family in present]
    found = {first: 0.0}
    for name, family in sorted(others, key=lambda pair: groups.index(pair[1])):
        found[name] = len(found) + 0.5 * groups.index(family)
    return found


def _draw_panel(
    panel: Axes, rows: Mapping[str, Mapping[Hashable, Any] | None], positions: Mapping[str, float], grid: Grid
) -> None:
    for strategy, position in positions.items():
        row = rows[strategy]
        if row is None or not row["num_ok"] or pd.isna(row[TIME_SHARES[0]]):
            text = "no cell" if row is None else row["status"] if not row["num_ok"] else "older run"
            panel.text(0.02, position, text, va="center_baseline", color=FAINT, style="italic")
            continue
        left = 0.0
        for name, colour in LOOKS.items():
            hatch = HATCHES.get(colour)
            style: dict[str, Any] = {"color": colour, "edgecolor": "#9a9a9a" if hatch else "white"}
            panel.barh(position, row[name], 0.86, left, hatch=hatch, linewidth=0.25, zorder=2, **style)
            left += row[name]
        work = row[TIME_SHARES[0]]
        text = f"{100 * work:.0f}{'*' if row['num_ok'] < row['num_runs'] else ''}"
        # A number that its own bar is too short for stands on the next ones, outlined.
        panel.text(
            max(work - 0.02, DIGIT * len(text)),
            position,
            text,
            ha="right",
            va="center_baseline",
            color="white",
            path_effects=[withStroke(linewidth=1.5, foreground=COLOURS[0])],
            zorder=3,
        )
    panel.set_xlim(0, 1)
    panel.set_xticks([0, 0.5, 1], ["0", "50", "100"])
    panel.set_ylim(max(positions.values()) + 0.5, -0.5)
    panel.set_yticks([*positions.values()], [grid.strategies[name] for name in positions])
    panel.tick_params(axis="y", length=0)
    panel.grid(visible=False, axis="y")


def _handles(table: pd.DataFrame) -> list[Artist]:
    """Legend of colours and numbers, without classes that no strategy has."""
    patches: list[Artist] = []
    for name, colour in LOOKS.items():
        if (table[name] > 0).any():
            style: dict[str, Any] = {"edgecolor": "#9a9a9a" if colour in HATCHES else "none", "label": TIME_WORDS[name]}
            patches.append(Patch(facecolor=colour, hatch=HATCHES.get(colour), **style))
    lacking = "; *: some seeds fail" if table["num_ok"].between(1, table["num_runs"] - 1).any() else ""
    return [*patches, Patch(facecolor="none", label=f"number: ideal work in %{lacking}")]
