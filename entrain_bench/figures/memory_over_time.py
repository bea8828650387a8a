"""Memory of every pipeline rank over one iteration, by strategy, trace and model.

Corresponds to arXiv:2605.27918, Figure 13; cells of ``experiments/figure/memory_over_time.yaml``. Each panel shows the
replica with the highest peak in the first iteration, on the model and trace where that is highest; states are included.
The CSV has all models and traces. Rows of the YAML after the first are panels of their own: Entrain with the warm-up of
1F1B, whose peaks are nearer to the paper's.
"""

from collections.abc import Mapping, Sequence

import pandas as pd
import seaborn as sns

from entrain_bench.answers.labels import in_order, names, spell
from entrain_bench.answers.tables import CASE, range_of, run_actions, run_table
from entrain_bench.answers.timelines import MEMORY, memory_of
from entrain_bench.figures._forms import handles
from entrain_bench.figures._style import COLOURBLIND, DOUBLE_COLUMN_IN, Picture, legend_above, panels, show_reason
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results

EXPERIMENT = "memory_over_time"
RUNS = True
TIMELINES = True
MAX_PANELS = 6
HOLDS = {"encoder": "rank with encoder stages", "llm": "rank with LLM stages", "both": "rank with both"}


def load(cells: Mapping[str, Sequence[Cell]], results: Results) -> pd.DataFrame:
    """Memory of the lanes of every run; strategies of rows after the first have the row's label."""
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
    return memory_of(in_order(pd.concat(tables, ignore_index=True)), pd.concat(actions, ignore_index=True))


def draw(data: pd.DataFrame) -> Picture:
    """A panel a strategy, a line a lane of one replica, in the model and trace with the highest peak."""
    labels, traces, models = (names(data, column) for column in ("strategy", "workload", "model"))
    labels = dict([*labels.items()][:MAX_PANELS])
    data = data.assign(gib=data["bytes"].astype(float) / 2**30)
    peaks = data.groupby(CASE, sort=False)["gib"].max().rename("peak_gib").reset_index()
    highest = peaks.iloc[int(peaks["peak_gib"].argmax())]
    mine = data[(data["model"] == highest["model"]) & (data["workload"] == highest["workload"])]
    figure, axes = panels(1, len(labels), DOUBLE_COLUMN_IN, 1.9, sharex=True, sharey=True)
    colours = dict(zip(HOLDS, COLOURBLIND, strict=False))
    look = {"drawstyle": "steps-post", "estimator": None, "legend": False, "linewidth": 0.6, "palette": colours}
    for panel, (name, label) in zip(axes, labels.items(), strict=True):
        panel.set_title(label)
        rows = mine[mine["strategy"] == name]
        if rows["gib"].isna().all():
            show_reason(panel, next(iter(rows.get("reason", ())), "no run"))
            continue
        sns.lineplot(rows, x="time_s", y="gib", hue="holds", units="lane", ax=panel, **look)
        panel.set(xlim=(0, None), ylim=(0, 1.05 * highest["peak_gib"]), xlabel="", ylabel="")
    axes[0].set_ylabel("memory (GiB)")
    figure.supxlabel("time (s)")
    present = {kind: colours[kind] for kind in HOLDS if kind in {*data["holds"]}}
    legend_above(figure, handles(present, HOLDS, marker=","))
    message = f"Shown: {models[highest['model']]} on {traces[highest['workload']]}. Peak memory of a rank: "
    message += f"{range_of(data, peaks.dropna(), 'peak_gib', '{:.1f} GiB')}."
    return Picture(figure, data[[*CASE, *MEMORY, *(["reason"] if "reason" in data else [])]], message)
