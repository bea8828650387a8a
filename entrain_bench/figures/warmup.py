"""Iteration time and peak memory of 1F1B schedules against the number of encoder forwards ahead of 1F1B.

Section 5.3 of arXiv:2605.27918 runs as many as memory allows; here every strategy may, up to a number. Cells of
``experiments/figure/warmup.yaml``. Means over seeds.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from entrain_bench.answers.tables import over_seeds, run_table
from entrain_bench.figures._bars import Grid, draw_lines, line_handles
from entrain_bench.figures._style import facets, legend_above, say
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results

EXPERIMENT = "warmup"
RUNS = True
GIB = 2**30
# What stands on the axis for no limit but memory.
UNLIMITED = "any"
ROWS = {"iteration_time_s": "Iteration time (s)", "peak_memory_gib": "Peak memory (GiB)"}


def load(cells: Sequence[Cell], results: Results) -> pd.DataFrame:
    """The table of the sweep's runs; ``max_extra_forwards`` is a text, as it stands on the axis."""
    table = run_table(cells, results, {"max_extra_forwards": "strategy.scheduler.max_extra_forwards"})
    most = [UNLIMITED if pd.isna(number) else str(int(number)) for number in table["max_extra_forwards"]]
    return table.assign(max_extra_forwards=most)


def draw(data: pd.DataFrame) -> tuple[Figure, pd.DataFrame]:
    """Columns of panels for models and traces, a line a strategy; times above, memory below."""
    # Columns of runs without result are absent.
    data = data.assign(peak_memory_gib=data.get("peak_memory_bytes", pd.Series(float("nan"), data.index)) / GIB)
    grid = Grid.of(data)
    keys = ["workload", "model", "strategy", "max_extra_forwards"]
    table = over_seeds(data, keys, **{name: (name, "mean") for name in ROWS})
    ticks = sorted(table["max_extra_forwards"].unique(), key=lambda text: (text == UNLIMITED, text.zfill(9)))
    table = table.assign(place=table["max_extra_forwards"].map(ticks.index))
    cases = [(model, workload) for model in grid.models for workload in grid.workloads]
    figure, axes = facets([*ROWS], cases, 3.4, sharex=True)
    for column, (model, workload), panel in axes:
        rows = table[(table["workload"] == workload) & (table["model"] == model)]
        draw_lines(panel, rows, "place", column, "strategy", grid.colours, grid.strategies)
        panel.yaxis.set_major_locator(MaxNLocator(5))
        panel.set_xticks(range(len(ticks)), ticks)
        if column == "peak_memory_gib":
            panel.set_ylim(bottom=0)
        if column == next(iter(ROWS)):
            panel.set_title(f"{grid.workloads[workload]}, {grid.models[model]}")
        if (model, workload) == cases[0]:
            panel.set_ylabel(ROWS[column])
    figure.supxlabel("Forwards that encoder stages run ahead of 1F1B, at most", fontsize="medium")
    legend_above(figure, line_handles(grid.colours, grid.strategies))
    say(figure, _message(grid, table, ticks))
    return figure, table.drop(columns="place")


def _message(grid: Grid, table: pd.DataFrame, ticks: Sequence[str]) -> str:
    """Change from the first number of forwards to the last, by strategy, mean over the jobs."""
    keys = ["workload", "model"]
    said = []
    for name, rows in table.groupby("strategy", sort=False):
        first, last = (rows[rows["max_extra_forwards"] == tick].set_index(keys) for tick in (ticks[0], ticks[-1]))
        change = 100 * ((last["iteration_time_s"] / first["iteration_time_s"]).mean() - 1)
        gib = (last["peak_memory_gib"] - first["peak_memory_gib"]).mean()
        said.append(f"{grid.strategies[str(name)]} {change:+.0f}% time, {gib:+.1f} GiB")
    return f"{ticks[-1].capitalize()} instead of {ticks[0]} forwards ahead: {'; '.join(said)}."
