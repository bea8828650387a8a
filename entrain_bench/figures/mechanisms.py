"""Gain of each mechanism, switched on alone and last, by class of job.

No figure of arXiv:2605.27918 or the other papers, which measure systems as a whole. Pairs of rows of
``experiments/figure/mechanisms.yaml``, without and with a mechanism: alone on a simple strategy, and last on top of the
others. A dot is a job, a bar the mean of jobs, both geometric means.
"""

from typing import Any

import pandas as pd
import seaborn as sns

from entrain_bench.answers.documents import mechanisms
from entrain_bench.figures._forms import handles
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, FAINT, INK, Picture, legend_above, palette, panels

EXPERIMENT = mechanisms.EXPERIMENT
RUNS = True
SWITCHES = {"alone": "switched on alone", "last": "switched on last"}
load = mechanisms.gains


def draw(data: pd.DataFrame) -> Picture:
    """A row a mechanism, a panel a switch."""
    table = data.assign(percent=100 * data["gain"].astype(float))
    means = 100 * data.groupby(["mechanism", "switched"])["gain"].agg(mechanisms.mean_gain)
    order = [str(name) for name in means.groupby("mechanism").max().sort_values(ascending=False, kind="stable").index]
    colours = palette(table["job"].unique())
    height_in = 0.75 + 0.26 * len(order)
    figure, axes = panels(1, len(SWITCHES), DOUBLE_COLUMN_IN, height_in, sharex=True, sharey=True)
    look: dict[str, Any] = {"order": order, "size": 4, "alpha": 0.9, "jitter": False, "legend": False}
    said = []
    for panel, (switch, title) in zip(axes, SWITCHES.items(), strict=True):
        mine = table[table["switched"] == switch]
        panel.axvline(0, color=FAINT, linewidth=0.8, zorder=0)
        sns.stripplot(mine, x="percent", y="mechanism", hue="job", palette=colours, ax=panel, **look)
        shown = means[means.index.get_level_values("switched") == switch].droplevel("switched").dropna()
        places = [order.index(name) for name in shown.index]
        panel.scatter(shown, places, marker="|", s=110, color=INK, linewidth=1.4, zorder=5)
        panel.set(title=title, xlabel="", ylabel="", ylim=(len(order) - 0.4, -0.6))
        panel.tick_params(axis="y", length=0)
        if len(shown):
            said.append(f"{title}, {shown.idxmax()} gains most ({shown.max():+.1f}%)")
    figure.supxlabel("gain (%); bar: mean of jobs")
    legend_above(figure, handles(colours, dict(zip(colours, colours, strict=True)), line="", marker="o"), 3)
    message = f"In the mean of jobs, {'; '.join(said)}." if said else "No mechanism has a result."
    return Picture(figure, table.drop(columns="percent"), f"Gain: time without over time with, minus 1. {message}")
