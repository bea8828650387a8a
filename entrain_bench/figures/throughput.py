"""Model TFLOP/s of a GPU by strategy, trace and model.

Corresponds to the comparisons of arXiv:2603.25120 (TFLOPS/GPU) and arXiv:2408.04275 (throughput), on the cells of
``experiments/figure/systems.yaml``. Means over seeds; the CSV has 95% intervals and samples per second.
"""

import pandas as pd

from entrain_bench.answers.labels import names
from entrain_bench.answers.tables import interval_over_seeds, lacking, range_of, run_table
from entrain_bench.figures._style import Picture, ranking_by

EXPERIMENT = "systems"
RUNS = True
load = run_table
CASE = ["workload", "model", "strategy"]
METRICS = ["samples_per_s", "tflops_per_gpu"]


def draw(data: pd.DataFrame) -> Picture:
    """A row a strategy, a column a job."""
    table, other = (interval_over_seeds(data, CASE, metric) for metric in METRICS)
    table = table.merge(other[[*CASE, *other.columns.difference(table.columns, sort=False)]], on=CASE)
    figure = ranking_by(data, table, METRICS[1], "TFLOP/s of a GPU", "{:.0f}", descending=True)
    message = f"Model TFLOP/s of a GPU: {range_of(data, table, METRICS[1], '{:.0f}')}."
    return Picture(figure, table, message + lacking(table, names(data, "strategy")))
