"""Memory of every pipeline rank over one iteration, by strategy.

Corresponds to arXiv:2605.27918, Figure 13; cells of ``experiments/figure/schedule_gantt.yaml``. Each strategy shows the
replica with the highest peak in the first iteration; states are included. A value holds until the lane's next action.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from entrain_bench.compose import Cell
from entrain_bench.errors import UserError
from entrain_bench.figures._data import Runs, replica_lanes, run_actions, run_table
from entrain_bench.figures._labels import names
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, Colour, legend_above, palette, panels, show_reason
from entrain_bench.records import Results

EXPERIMENT = "schedule_gantt"
RUNS = True
MAX_COLUMNS = 4
GIB = 2**30
HOLDS = {"encoder": "rank holds encoder stages", "llm": "LLM stages", "both": "both"}


def load(cells: Sequence[Cell], results: Results) -> Runs:
    """The table of the runs and their timelines."""
    return Runs(run_table(cells, results), run_actions(cells, results))


def draw(data: Runs) -> tuple[Figure, pd.DataFrame]:
    """A panel a strategy, a line a lane of one replica."""
    if "memory_bytes" not in data.actions:
        raise UserError("no timeline of the sweep holds memory")
    labels = names(data.table, "strategy")
    lanes = {str(name): peak_replica(rows) for name, rows in data.actions.groupby("strategy", sort=False)}
    columns = min(MAX_COLUMNS, len(labels))
    rows = -(-len(labels) // columns)
    figure, axes = panels(rows, columns, DOUBLE_COLUMN_IN, 0.45 + 1.4 * rows, sharey=True)
    colours = palette(HOLDS)
    for panel, name in zip(axes, labels, strict=False):
        panel.set_title(labels[name], loc="left")
        if name in lanes:
            _draw_lanes(panel, lanes[name], colours)
        else:
            run = data.table[data.table["strategy"] == name].iloc[0]
            show_reason(panel, "no timeline kept" if run["status"] == "ok" else f"{run['status']}: {run['reason']}")
    for panel in axes[len(labels) :]:
        panel.set_visible(False)
    for panel in axes[::columns]:
        panel.set_ylabel("Memory (GiB)")
    axes[0].set_ylim(bottom=0)
    figure.supxlabel("Time (s)", fontsize="medium")
    present = {kind for rows in lanes.values() for kind in rows["holds"]}
    handles = [Line2D([], [], color=colours[kind], label=HOLDS[kind]) for kind in HOLDS if kind in present]
    legend_above(figure, handles)
    shown = pd.concat([rows.assign(strategy=name) for name, rows in lanes.items()])
    return figure, shown[["strategy", "lane", "holds", "start_s", "memory_bytes"]]


def peak_replica(actions: pd.DataFrame) -> pd.DataFrame:
    """Memory over time on the lanes of the replica that holds the most.

    Returns:
        Columns ``lane`` (from 0), ``holds`` (encoder, llm or both), ``start_s``, ``memory_bytes``; a row where a lane's
        memory changes and one where the lane ends.
    """
    work = actions[actions["replica"] >= 0]
    mine = replica_lanes(actions, int(work["replica"].iloc[int(work["memory_bytes"].argmax())]))
    sides = (
        mine[mine["replica"] >= 0]
        .groupby("lane")["side"]
        .agg(lambda held: "both" if held.nunique() > 1 else held.iloc[0])
    )
    last = mine.groupby("lane").tail(1).assign(start_s=mine["end_s"].max())
    steps = pd.concat([mine.sort_values(["lane", "start_s"], kind="stable"), last]).sort_values("lane", kind="stable")
    ends = np.append(np.diff(steps["lane"]) != 0, True)
    changed = np.append(True, np.diff(steps["memory_bytes"]) != 0)
    kept: pd.DataFrame = steps[changed | ends | np.append(True, ends[:-1])]
    return kept.assign(holds=kept["lane"].map(sides)).reindex(columns=["lane", "holds", "start_s", "memory_bytes"])


def _draw_lanes(panel: Axes, lanes: pd.DataFrame, colours: dict[str, Colour]) -> None:
    for _, rows in lanes.groupby("lane"):
        gib = rows["memory_bytes"] / GIB
        panel.plot(rows["start_s"], gib, color=colours[rows["holds"].iloc[0]], linewidth=0.6, drawstyle="steps-post")
    panel.set_title(f"{lanes['memory_bytes'].max() / GIB:.1f} GiB", loc="right")
    panel.set_xlim(left=0)
    panel.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
