"""Throughput by strategy, trace and model: samples per second, and model TFLOP/s of a GPU.

Corresponds to the comparisons of arXiv:2603.25120 (TFLOPS/GPU) and arXiv:2408.04275 (throughput), on the cells of
``experiments/figure/systems.yaml``. Bars are samples per second, TFLOP/s those of a GPU. All numbers are means over
seeds; their 95% intervals are in the CSV file.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from entrain_bench.answers.tables import interval_over_seeds, run_table
from entrain_bench.figures._ranked import draw_metric, number, range_of
from entrain_bench.figures._style import say

EXPERIMENT = "systems"
RUNS = True
load = run_table
CASE = ["workload", "model", "strategy"]
METRICS = ["samples_per_s", "tflops_per_gpu"]


def draw(data: pd.DataFrame) -> tuple[Figure, pd.DataFrame]:
    """A panel a trace and model, a bar a strategy, the fastest on top."""
    table, other = (interval_over_seeds(data, CASE, metric) for metric in METRICS)
    table = table.merge(other[[*CASE, *other.columns.difference(table.columns, sort=False)]], on=CASE)
    headings = ["samples/s", "TFLOP/s"]
    figure = draw_metric(
        data, table, METRICS[0], headings, lambda row: [number(row[name]) for name in METRICS], descending=True
    )
    say(figure, f"Model TFLOP/s of a GPU: {range_of(data, table, METRICS[1], '{:.0f}')}.")
    return figure, table
