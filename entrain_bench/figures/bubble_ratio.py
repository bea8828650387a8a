"""Share of GPU time that is idle, by strategy and trace, in a pipeline of 4 stages and 16 microbatches.

Corresponds to arXiv:2605.27918, Figure 6; cells of ``experiments/figure/bubble_ratio.yaml``. Means over seeds and
iterations; 95% intervals are in the CSV. Communication inside passes counts as busy (docs/metrics.md).
"""

import pandas as pd

from entrain_bench.answers.tables import interval_over_seeds, range_of, run_table
from entrain_bench.figures._style import Picture, ranking_by

EXPERIMENT = "bubble_ratio"
RUNS = True
load = run_table


def draw(data: pd.DataFrame) -> Picture:
    """A row a strategy, a column a job."""
    table = interval_over_seeds(data, ["workload", "model", "strategy"], "bubble_ratio")
    figure = ranking_by(data, table, "bubble_ratio", "idle share of GPU time", "{:.0%}")
    return Picture(figure, table, f"Idle GPU time: {range_of(data, table, 'bubble_ratio', '{:.0%}')}.")
