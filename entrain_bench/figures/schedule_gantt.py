"""Schedules of the strategies on one global batch: the passes of every stage of a replica over time.

Corresponds to arXiv:2605.27918, Figure 12; cells of ``experiments/figure/schedule_gantt.yaml``. Each strategy shows its
slowest replica in the first iteration, or the ranks of a widest group, where a group is one bar with its degrees. A
deferred part is a part of a microbatch after its first: the encoder work of samples whose LLM microbatch comes later.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.patches import Patch

from entrain_bench.answers.labels import names
from entrain_bench.answers.tables import Runs, run_actions, run_table
from entrain_bench.answers.text import seconds
from entrain_bench.base.errors import UserError
from entrain_bench.figures._lanes import colours_of, draw_lanes, slowest_replica
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, Picture, legend_above, panels, show_reason
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results

EXPERIMENT = "schedule_gantt"
RUNS = True
TIMELINES = True
# Height of a lane, of a replica of few lanes, and of a title.
LANE_IN = 0.045
REPLICA_IN = 0.28
TITLE_IN = 0.17


def load(cells: Sequence[Cell], results: Results) -> Runs:
    """The table of the runs and their timelines."""
    return Runs(run_table(cells, results), run_actions(cells, results))


def draw(data: Runs) -> Picture:
    """A panel a strategy, over one time axis for all."""
    if data.actions.empty:
        raise UserError("figure=schedule_gantt: no run of the sweep has a timeline")
    labels = names(data.table, "strategy")
    bars = {str(name): slowest_replica(rows) for name, rows in data.actions.groupby("strategy", sort=False)}
    colours = colours_of(pd.concat(bars.values()))
    heights = [max(REPLICA_IN, LANE_IN * bars[name]["lane"].nunique()) if name in bars else 0.5 for name in labels]
    height_in = 0.9 + sum(heights) + TITLE_IN * len(heights)
    figure, axes = panels(len(labels), 1, DOUBLE_COLUMN_IN, height_in, sharex=True, height_ratios=heights)
    ends = {name: float(rows["end_s"].max()) for name, rows in bars.items()}
    for panel, (name, label) in zip(axes, labels.items(), strict=True):
        panel.set_title(label, loc="left")
        if name in bars:
            panel.set_title(f"{ends[name]:.3f} s", loc="right")
            draw_lanes(panel, bars[name], colours, 1.01 * max(ends.values()))
        else:
            run = data.table[data.table["strategy"] == name].iloc[0]
            show_reason(panel, "no timeline kept" if run["status"] == "ok" else f"{run['status']}: {run['reason']}")
    axes[-1].set_xlabel("Time (s)")
    legend_above(figure, [Patch(facecolor=colour, label=label) for label, colour in colours.items()], columns=4)
    extremes = (min(ends, key=ends.__getitem__), max(ends, key=ends.__getitem__))
    said = " and ".join(f"{seconds(ends[name])} s with {labels[name]}" for name in extremes)
    columns = ["strategy", "lane", "stage", "module", "pass", "microbatch", "part", "deferred", "start_s", "end_s"]
    shown = pd.concat([rows.assign(strategy=name) for name, rows in bars.items()])
    table = shown[[*columns, *["group"] * ("group" in shown)]]
    return Picture(figure, table, f"The same batch takes {said}.")
