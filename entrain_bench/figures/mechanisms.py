"""Gain of each mechanism, switched on alone and last, by class of job.

No figure of arXiv:2605.27918 or the other papers, which measure systems as a whole. Pairs of rows of
``experiments/figure/mechanisms.yaml``, without and with a mechanism: alone on a simple strategy, and last on top of the
others. A dot is a job, a bar the mean of jobs, both geometric means.
"""

from typing import Any

import pandas as pd
import seaborn as sns
from matplotlib.lines import Line2D

from entrain_bench.answers.documents import mechanisms
from entrain_bench.figures import _style as style

EXPERIMENT = mechanisms.EXPERIMENT
RUNS = True
SWITCHES = {"alone": "switched on alone", "last": "switched on last"}
load = mechanisms.gains


def draw(data: pd.DataFrame) -> style.Picture:
    """A row a mechanism, a panel a switch."""
    table = data.assign(percent=100 * data["gain"].astype(float))
    means = 100 * data.groupby(["mechanism", "switched"])["gain"].agg(mechanisms.mean_gain)
    order = [str(name) for name in means.groupby("mechanism").max().sort_values(ascending=False, kind="stable").index]
    colours = style.palette(table["job"].unique())
    height_in = 0.75 + 0.26 * len(order)
    figure, axes = style.panels(1, len(SWITCHES), style.DOUBLE_COLUMN_IN, height_in, sharex=True, sharey=True)
    look: dict[str, Any] = {"order": order, "size": 4, "alpha": 0.9, "jitter": False, "legend": False}
    for panel, (switch, title) in zip(axes, SWITCHES.items(), strict=True):
        mine = table[table["switched"] == switch]
        panel.axvline(0, color=style.FAINT, linewidth=0.8, zorder=0)
        sns.stripplot(mine, x="percent", y="mechanism", hue="job", palette=colours, ax=panel, **look)
        for place, name in enumerate(order):
            mean = means.get((name, switch))
            if mean is not None and pd.notna(mean):
                panel.plot([mean, mean], [place - 0.3, place + 0.3], color=style.INK, linewidth=1.4)
        panel.set(title=title, xlabel="", ylabel="")
        panel.tick_params(axis="y", length=0)
    figure.supxlabel("Gain (time without / time with - 1), %")
    dots: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 4}
    style.legend_above(figure, [Line2D([], [], color=colour, label=job, **dots) for job, colour in colours.items()], 3)
    return style.Picture(figure, table.drop(columns="percent"), _message(means))


def _message(means: "pd.Series[float]") -> str:
    told = []
    for switch in SWITCHES:
        mine = means[means.index.get_level_values("switched") == switch].dropna()
        if not mine.empty:
            told.append(f"{SWITCHES[switch]}, {mine.index[int(mine.argmax())][0]} gains most ({mine.max():+.1f}%)")
    return f"In the mean of jobs, {'; '.join(told)}." if told else "No mechanism has a result."
