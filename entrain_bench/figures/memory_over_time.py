"""Memory of every pipeline rank over one iteration, by strategy, trace and model.

Corresponds to arXiv:2605.27918, Figure 13; cells of ``experiments/figure/memory_over_time.yaml``. Each panel shows the
replica with the highest peak in the first iteration, on the model and trace where that is highest; states are included.
The CSV has all models and traces. Rows of the YAML after the first are panels of their own: Entrain with the warm-up of
1F1B, whose peaks are nearer to the paper's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
import seaborn as sns
from matplotlib.lines import Line2D

from entrain_bench.answers.labels import in_order, names, spell
from entrain_bench.answers.tables import Runs, range_of, run_actions, run_table
from entrain_bench.base.errors import UserError
from entrain_bench.figures._lanes import extreme_replica
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, Picture, legend_above, palette, panels, show_reason
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results

EXPERIMENT = "memory_over_time"
RUNS = True
TIMELINES = True
CASE = ["model", "workload", "strategy"]
GIB = 2**30
COLUMNS = ["lane", "holds", "time_s", "bytes"]
HOLDS = {"encoder": "rank with encoder stages", "llm": "rank with LLM stages", "both": "rank with both"}


def load(cells: Mapping[str, Sequence[Cell]], results: Results) -> Runs:
    """The table of the runs and their timelines; beside strategies of rows after the first stands the row's label."""
    first, *_ = cells
    tables = []
    actions = []
    for label, row in cells.items():
        table = run_table(row, results)
        timelines = run_actions(row, results)
        if label != first:
            called = [text or spell(name) for name, text in table[["strategy", "strategy_label"]].to_numpy()]
            table["strategy_label"] = [f"{text}, {label}" for text in called]
            for frame in (table, timelines):
                frame["strategy"] += f", {label}"
        tables.append(table)
        actions.append(timelines)
    return Runs(in_order(pd.concat(tables, ignore_index=True)), pd.concat(actions, ignore_index=True))


def draw(data: Runs) -> Picture:
    """A panel a strategy, a line a lane of one replica, in the model and trace with the highest peak."""
    if "memory_bytes" not in data.actions:
        raise UserError("figure=memory_over_time: no timeline of the sweep has memory")
    labels, traces, models = (names(data.table, column) for column in ("strategy", "workload", "model"))
    lanes = {key: peak_replica(rows) for key, rows in data.actions.groupby(CASE, sort=False)}
    peaks = pd.DataFrame([(*key, float(steps["bytes"].max()) / GIB) for key, steps in lanes.items()])
    peaks.columns = [*CASE, "peak_gib"]
    model, trace, _, highest = max(peaks.itertuples(index=False, name=None), key=lambda row: row[-1])
    figure, axes = panels(1, len(labels), DOUBLE_COLUMN_IN, 1.9, sharex=True, sharey=True)
    colours = palette(HOLDS)
    for panel, (name, label) in zip(axes, labels.items(), strict=True):
        panel.set_title(label)
        steps = lanes.get((model, trace, name))
        if steps is None:
            runs = data.table[(data.table[CASE] == [model, trace, name]).all(axis=1)]
            states = [f"{status}: {why}" for status, why in zip(runs["status"], runs["reason"], strict=True)]
            show_reason(panel, next(iter(states), "no run"))
            continue
        look = {"drawstyle": "steps-post", "estimator": None, "legend": False, "linewidth": 0.6, "palette": colours}
        gib = steps.assign(gib=steps["bytes"] / GIB)
        sns.lineplot(gib, x="time_s", y="gib", hue="holds", units="lane", ax=panel, **look)
        panel.set(xlim=(0, None), ylim=(0, 1.05 * highest), xlabel="", ylabel="")
    axes[0].set_ylabel("Memory (GiB)")
    figure.supxlabel(f"Time (s), {models[model]} on {traces[trace]}")
    present = {kind for steps in lanes.values() for kind in steps["holds"]}
    legend_above(figure, [Line2D([], [], color=colours[kind], label=HOLDS[kind]) for kind in HOLDS if kind in present])
    shown = pd.concat(lanes, names=CASE).reset_index(CASE)[[*CASE, *COLUMNS]]
    message = f"Peak memory of a rank: {range_of(data.table, peaks, 'peak_gib', '{:.1f} GiB')}."
    return Picture(figure, shown, message)


def peak_replica(actions: pd.DataFrame) -> pd.DataFrame:
    """Memory over time on the lanes of the replica that holds the most: a row where it changes, and a last one."""
    mine = extreme_replica(actions, "memory_bytes")
    sides = mine[mine["replica"] >= 0].groupby("lane")["side"].unique()
    holds = sides.map(lambda held: "both" if len(held) > 1 else held[0])
    steps = memory_steps(mine)
    last = ~steps["lane"].duplicated(keep="last")
    changed = steps.groupby("lane")["bytes"].diff() != 0  # NaN, in the first row of a lane, differs
    return steps[changed | last].assign(holds=steps["lane"].map(holds))[COLUMNS]


def memory_steps(frame: pd.DataFrame) -> pd.DataFrame:
    """Memory of a rank of each lane from ``time_s`` to the lane's next row, by lane and time (``timeline_frame``)."""
    lanes = frame[["lane", "rank"]]
    running = lanes.assign(time_s=frame["start_s"], bytes=frame["memory_bytes"])
    ended = lanes.assign(time_s=frame["end_s"], bytes=frame["memory_after_bytes"])
    # Entries of a lane follow each other in time: alternating them keeps the order where times are equal.
    return pd.concat([running, ended]).sort_index(kind="stable").reset_index(drop=True)
