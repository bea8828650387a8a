"""Memory of every pipeline rank over one iteration, by strategy, trace and model.

Corresponds to arXiv:2605.27918, Figure 13; cells of ``experiments/figure/memory_over_time.yaml``. Each panel shows the
replica with the highest peak in the first iteration, and has that peak in GiB above; states are included. Rows of the
YAML after the first are panels of their own: Entrain with the warm-up of 1F1B, whose peaks are nearer to the paper's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from entrain_bench.answers.labels import in_order, names, spell
from entrain_bench.answers.tables import Runs, run_actions, run_table
from entrain_bench.base.errors import UserError
from entrain_bench.figures._ranked import range_of
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, legend_above, palette, panels, say, show_reason
from entrain_bench.figures.schedule_gantt import extreme_replica
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results

EXPERIMENT = "memory_over_time"
RUNS = True
TIMELINES = True
CASE = ["model", "workload"]
MAX_COLUMNS = 5
GIB = 2**30
COLUMNS = ["lane", "holds", "time_s", "bytes"]
HOLDS = {"encoder": "rank with encoder stages", "llm": "rank with LLM stages", "both": "rank with both"}


def load(cells: Mapping[str, Sequence[Cell]], results: Results) -> Runs:
    """The table of the runs and their timelines; beside strategies of rows after the first stands the row's label."""
    first, *_ = cells
    tables = []
    actions = []
    for label, each in cells.items():
        table = run_table(each, results)
        timelines = run_actions(each, results)
        if label != first:
            called = [text or spell(name) for name, text in table[["strategy", "strategy_label"]].to_numpy()]
            table["strategy_label"] = [f"{text}, {label}" for text in called]
            for frame in (table, timelines):
                frame["strategy"] += f", {label}"
        tables.append(table)
        actions.append(timelines)
    return Runs(in_order(pd.concat(tables, ignore_index=True)), pd.concat(actions, ignore_index=True))


def draw(data: Runs) -> tuple[Figure, pd.DataFrame]:
    """A panel a strategy, trace and model, a line a lane of one replica; one trace and model fill several rows."""
    if "memory_bytes" not in data.actions:
        raise UserError("figure=memory_over_time: no timeline of the sweep has memory")
    labels, traces, models = (names(data.table, column) for column in ("strategy", "workload", "model"))
    lanes = {key: peak_replica(rows) for key, rows in data.actions.groupby([*CASE, "strategy"], sort=False)}
    cases = [*data.table[CASE].drop_duplicates().itertuples(index=False, name=None)]
    columns = min(MAX_COLUMNS, len(labels))
    height = -(-len(labels) // columns)
    rows = height * len(cases)
    figure, axes = panels(rows, columns, DOUBLE_COLUMN_IN, 0.45 + 1.4 * rows)
    colours = palette(HOLDS)
    for number, (model, trace) in enumerate(cases):
        own = axes[number * height * columns : (number + 1) * height * columns]
        for panel, name in zip(own, labels, strict=False):
            panel.set_title(labels[name], loc="left")
            key = (model, trace, name)
            if key in lanes:
                for _, steps in lanes[key].groupby("lane"):
                    look: Any = {"color": colours[steps["holds"].iloc[0]], "linewidth": 0.6, "drawstyle": "steps-post"}
                    panel.plot(steps["time_s"], steps["bytes"] / GIB, **look)
                panel.set_title(f"{lanes[key]['bytes'].max() / GIB:.1f}", loc="right")
                panel.set_xlim(left=0)
                panel.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
            else:
                runs = data.table[(data.table[[*CASE, "strategy"]] == [*key]).all(axis=1)]
                states = zip(runs["status"], runs["reason"], strict=True)
                reasons = ("no timeline kept" if status == "ok" else f"{status}: {why}" for status, why in states)
                show_reason(panel, next(reasons, "no run"))
        for panel in own[len(labels) :]:
            panel.set_visible(False)
        highest = max((float(lanes[key]["bytes"].max()) for key in lanes if key[:2] == (model, trace)), default=GIB)
        for panel in own:
            panel.set_ylim(0, 1.05 * highest / GIB)
        for panel in own[::columns]:
            panel.set_ylabel(f"{models[model]}, {traces[trace]}\nMemory (GiB)")
    figure.supxlabel("Time (s)", fontsize="medium")
    present = {kind for rows in lanes.values() for kind in rows["holds"]}
    handles = [Line2D([], [], color=colours[kind], label=HOLDS[kind]) for kind in HOLDS if kind in present]
    legend_above(figure, [*handles, Line2D([], [], linestyle="", label="number: peak of a rank (GiB)")])
    peaks = pd.DataFrame([(*key, float(steps["bytes"].max()) / GIB) for key, steps in lanes.items()])
    peaks.columns = [*CASE, "strategy", "peak_gib"]
    say(figure, f"Peak memory of a rank: {range_of(data.table, peaks, 'peak_gib', '{:.1f} GiB')}.")
    keys = [*CASE, "strategy"]
    shown = pd.concat(lanes, names=keys).reset_index(keys)
    return figure, shown[[*keys, *COLUMNS]]


def peak_replica(actions: pd.DataFrame) -> pd.DataFrame:
    """Memory over time on the lanes of the replica that holds the most: a row where it changes, and a lane's last one.

    Returns:
        Columns ``lane`` (from 0), ``holds`` (encoder, llm or both), ``time_s``, ``bytes``.
    """
    mine = extreme_replica(actions, "memory_bytes")
    sides = mine[mine["replica"] >= 0].groupby("lane")["side"].unique()
    holds = sides.map(lambda held: "both" if len(held) > 1 else held[0])
    steps = memory_steps(mine)
    last = ~steps["lane"].duplicated(keep="last")
    changed = steps.groupby("lane")["bytes"].diff() != 0  # NaN, in the first row of a lane, differs
    return steps[changed | last].assign(holds=steps["lane"].map(holds))[COLUMNS]


def memory_steps(frame: pd.DataFrame) -> pd.DataFrame:
    """Memory of a rank of each lane over time, from the columns of ``timeline_frame``.

    Returns:
        Columns ``lane``, ``rank``, ``time_s``, ``bytes``, by lane and time: the memory from that time until the lane's
        next row. Before its first row a lane holds what it holds after its last one.
    """
    lanes = frame[["lane", "rank"]]
    running = lanes.assign(time_s=frame["start_s"], bytes=frame["memory_bytes"])
    ended = lanes.assign(time_s=frame["end_s"], bytes=frame["memory_after_bytes"])
    # Entries of a lane follow each other in time: alternating them keeps the order where times are equal.
    return pd.concat([running, ended]).sort_index(kind="stable").reset_index(drop=True)
