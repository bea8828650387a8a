"""GPU-time breakdown of an iteration under every strategy: ideal work, and all other time by its cause.

No figure of a paper: arXiv:2605.27918, Figure 6, has the idle share alone. Cells of
``experiments/figure/iteration_time.yaml``. Every second of every GPU is in one class (docs/metrics.md), so a bar is
100%; segments are means over the jobs and the seeds that have a result. The CSV has every job.
"""

import pandas as pd

from entrain_bench.answers.labels import names
from entrain_bench.answers.tables import CASE, JOB, lacking, over_seeds, range_of, run_table
from entrain_bench.answers.text import TIME_WORDS
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, ROW_IN, Picture, panels
from entrain_bench.records.time_shares import EXPERT_SHARES, TIME_SHARES

EXPERIMENT = "iteration_time"
RUNS = True
load = run_table
# Computation is blue, communication yellow, unequal load red, the rest grey.
COLOURS = ["#123c69", "#5b8fc0", "#b9d3ea", "#e8b02f", "#7f1d1d", "#cf4a3c", "#f3a08c", "#bdbdbd", "#757575", "#e3e3e3"]
COLOURS_OF_EXPERTS = ["#f7dc8b", "#b5651d"]


def draw(data: pd.DataFrame) -> Picture:
    """A bar a strategy, mean over its jobs, the most ideal work on top."""
    labels = names(data, "strategy")
    of_experts = [name for name in EXPERT_SHARES if name in data]
    classes = [*TIME_SHARES, *of_experts]
    table = over_seeds(data.fillna(dict.fromkeys(of_experts, 0.0)), CASE, **{name: (name, "mean") for name in classes})
    there = table.dropna(subset=TIME_SHARES[0])
    shares = there.groupby("strategy", sort=False)[classes].mean()
    shares = shares.sort_values(TIME_SHARES[0], ascending=False, kind="stable")
    num_jobs = len(table[JOB].drop_duplicates())
    counts = there["strategy"].value_counts()
    fewer = counts[counts < num_jobs].map(" ({} jobs)".format)
    figure, (panel,) = panels(1, 1, DOUBLE_COLUMN_IN, max(1.5, 0.5 + ROW_IN * len(shares)))
    left = pd.Series(0.0, shares.index)
    colours = dict(zip((*TIME_SHARES, *EXPERT_SHARES), COLOURS + COLOURS_OF_EXPERTS, strict=True))
    for name in classes:
        if shares[name].max() > 0:
            panel.barh(
                range(len(shares)), shares[name], 0.78, left, color=colours[name], label=TIME_WORDS[name], linewidth=0
            )
        left = left + shares[name]
    for place, work in enumerate(shares[TIME_SHARES[0]]):
        panel.text(work - 0.01, place, f"{100 * work:.0f}", ha="right", va="center", color="white")
    panel.set_yticks(range(len(shares)), [f"{labels[str(name)]}{fewer.get(name, '')}" for name in shares.index])
    panel.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100"])
    of = f", mean over {num_jobs} jobs" if num_jobs > 1 else ""
    panel.set(xlim=(0, 1), ylim=(len(shares) - 0.4, -0.6), xlabel=f"share of GPU time (%){of}")
    panel.tick_params(axis="y", length=0)
    panel.spines["left"].set_visible(False)
    panel.legend(loc="center left", bbox_to_anchor=(1, 0.5), handlelength=1, handleheight=1)
    message = f"Ideal work in GPU time: {range_of(data, table, TIME_SHARES[0], '{:.0%}')}."
    return Picture(figure, table, message + lacking(table, labels))
