"""Share of GPU time that is idle, by strategy and trace, in a pipeline of 4 stages and 16 microbatches.

Corresponds to arXiv:2605.27918, Figure 6; cells of ``experiments/figure/bubble_ratio.yaml``. Numbers are means over
seeds and iterations with half the width of their 95% intervals. Communication inside actions counts as busy
(docs/metrics.md).
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from entrain_bench.answers.tables import interval_over_seeds, run_table
from entrain_bench.figures._ranked import draw_metric, range_of
from entrain_bench.figures._style import say

EXPERIMENT = "bubble_ratio"
RUNS = True
load = run_table


def draw(data: pd.DataFrame) -> tuple[Figure, pd.DataFrame]:
    """A panel a trace and model, a bar a strategy, the least idle on top."""
    table = interval_over_seeds(data, ["workload", "model", "strategy"], "bubble_ratio")

    def texts(row: pd.Series) -> list[str]:
        half = 50 * (row["bubble_ratio_high"] - row["bubble_ratio_low"])
        return ["", f"{100 * row['bubble_ratio']:.0f} ±{half:.0f}%"]

    figure = draw_metric(data, table, "bubble_ratio", ["", "idle"], texts)
    say(figure, f"Idle GPU time: {range_of(data, table, 'bubble_ratio', '{:.0%}')}.")
    return figure, table
