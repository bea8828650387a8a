"""Memory of every pipeline rank over one iteration, by strategy, trace and model.

Corresponds to arXiv:2605.27918, Figure 13; cells of ``experiments/figure/memory_over_time.yaml``. Each panel shows the
replica with the highest peak in the first iteration, on the model and trace where that is highest; states are included.
The CSV has all models and traces. Rows of the YAML after the first are panels of their own: Entrain with the warm-up of
1F1B, whose peaks are nearer to the paper's.
"""

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
COLUMNS = ["lane", "holds", "time_s", "bytes"]
HOLDS = {"encoder": "rank with encoder stages", "llm": "rank with LLM stages", "both": "rank with both"}


def load(cells: Mapping[str, Sequence[Cell]], results: Results) -> Runs:
    """The table of the runs and their timelines; beside strategies of rows after the first stands the row's label."""
    tables = []
    actions = []
    for place, (label, row) in enumerate(cells.items()):
        beside = f", {label}" if place else ""
        table = run_table(row, results)
        stated = table["strategy_label"]
        table["strategy_label"] = stated.mask(stated == "", table["strategy"].map(spell))
        tables.append(table.assign(**{name: table[name] + beside for name in ("strategy", "strategy_label")}))
        timelines = run_actions(row, results)
        actions.append(timelines.assign(strategy=timelines["strategy"] + beside))
    return Runs(in_order(pd.concat(tables, ignore_index=True)), pd.concat(actions, ignore_index=True))


def draw(data: Runs) -> Picture:
    """A panel a strategy, a line a lane of one replica, in the model and trace with the highest peak."""
    if "memory_bytes" not in data.actions:
        raise UserError("figure=memory_over_time: no timeline of the sweep has memory")
    labels, traces, models = (names(data.table, column) for column in ("strategy", "workload", "model"))
    lanes = {key: peak_replica(rows) for key, rows in data.actions.groupby(CASE, sort=False)}
    shown = pd.concat(lanes, names=CASE).reset_index(CASE)[[*CASE, *COLUMNS]]
    peaks = (shown.groupby(CASE, sort=False)["bytes"].max() / 2**30).rename("peak_gib").reset_index()
    highest = peaks.iloc[int(peaks["peak_gib"].argmax())]
    figure, axes = panels(1, len(labels), DOUBLE_COLUMN_IN, 1.9, sharex=True, sharey=True)
    colours = palette(HOLDS)
    look = {"drawstyle": "steps-post", "estimator": None, "legend": False, "linewidth": 0.6, "palette": colours}
    for panel, (name, label) in zip(axes, labels.items(), strict=True):
        panel.set_title(label)
        case = (highest["model"], highest["workload"], name)
        if case not in lanes:
            runs = data.table[(data.table[CASE] == [*case]).all(axis=1)]
            show_reason(panel, next(iter(runs["status"] + ": " + runs["reason"]), "no run"))
            continue
        gib = lanes[case].assign(gib=lanes[case]["bytes"] / 2**30)
        sns.lineplot(gib, x="time_s", y="gib", hue="holds", units="lane", ax=panel, **look)
        panel.set(xlim=(0, None), ylim=(0, 1.05 * highest["peak_gib"]), xlabel="", ylabel="")
    axes[0].set_ylabel("Memory (GiB)")
    figure.supxlabel(f"Time (s), {models[highest['model']]} on {traces[highest['workload']]}")
    present = {*shown["holds"]}
    legend_above(figure, [Line2D([], [], color=colours[kind], label=HOLDS[kind]) for kind in HOLDS if kind in present])
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
