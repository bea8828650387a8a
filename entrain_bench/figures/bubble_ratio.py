"""Share of GPU time that is idle, by strategy and trace, in a pipeline of 4 stages and 16 microbatches.

Corresponds to arXiv:2605.27918, Figure 6; cells of ``experiments/figure/bubble_ratio.yaml``. Bars are means over seeds
and iterations, whiskers their 95 % intervals; communication inside actions counts as busy (docs/metrics.md).
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from entrain_bench.answers.tables import run_table
from entrain_bench.figures._bars import draw_metrics

EXPERIMENT = "bubble_ratio"
RUNS = True
load = run_table


def draw(data: pd.DataFrame) -> tuple[Figure, pd.DataFrame]:
    """A panel a trace, bars of the strategies side by side for every model."""
    axes, figure, table = draw_metrics(data, {"bubble_ratio": "Idle share of GPU time"}, 1.8, sharey=True)
    axes[0].set_ylim(0, 1)
    axes[0].yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    return figure, table
