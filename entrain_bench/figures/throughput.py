"""Throughput by strategy, trace and model: samples per second, and model TFLOP/s of a GPU.

Corresponds to the comparisons of arXiv:2603.25120 (TFLOPS/GPU) and arXiv:2408.04275 (throughput), on the cells of
``experiments/figure/systems.yaml``. Bars are means over seeds, whiskers their
95 % intervals.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from entrain_bench.answers.tables import run_table
from entrain_bench.figures._bars import draw_metrics
from entrain_bench.figures._style import NUMBER_FORMAT

EXPERIMENT = "systems"
RUNS = True
load = run_table


def draw(data: pd.DataFrame) -> tuple[Figure, pd.DataFrame]:
    """A row a metric, a panel a trace; bars of the strategies side by side for every model."""
    metrics = {"samples_per_s": "Samples/s", "tflops_per_gpu": "TFLOP/s of a GPU"}
    axes, figure, table = draw_metrics(data, metrics, 3.2, sharex=True)
    for panel in axes:
        panel.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
        panel.yaxis.set_major_formatter(NUMBER_FORMAT)
    return figure, table
