"""Iteration time with increasing errors of workload estimates, relative to estimates without error.

No figure of arXiv:2605.27918 or the other papers: their estimates are never wrong by more than their fits. Cells of
``experiments/figure/misprediction.yaml``; an error of e multiplies each sample's estimate by 1 + e u, u uniform in [-1,
1] (docs/costs.md). Bars are changes of the time at the largest error, numbers those at the two largest, in percent.
Ratios are taken seed by seed; the last number has half the width of its 95% interval. Strategies that assign and order
without estimates stay at 0.
"""

from __future__ import annotations

from functools import partial

import pandas as pd
from matplotlib.figure import Figure

from entrain_bench.answers.labels import names
from entrain_bench.answers.statistics import Interval
from entrain_bench.answers.tables import interval_over_seeds, relative_over_seeds, run_table
from entrain_bench.answers.text import count, listing
from entrain_bench.figures._ranked import change, draw_metric
from entrain_bench.figures._style import say

EXPERIMENT = "misprediction"
RUNS = True
CASE = ["workload", "model", "strategy"]
# A change of the time that counts as none.
UNAFFECTED = 0.001
ENDS = ["relative", "relative_low", "relative_high"]
load = partial(run_table, settings={"belief_error": "belief_error"})


def draw(data: pd.DataFrame) -> tuple[Figure, pd.DataFrame]:
    """A panel a model and trace, a bar a strategy, the least affected on top."""
    keys = [*CASE, "belief_error"]
    # NaN without a run without error at the same seed.
    ratios = relative_over_seeds(data, data[data["belief_error"] == 0], keys, CASE)
    table = interval_over_seeds(data, keys, "iteration_time_s").join(ratios, on=keys)
    *_, largest = errors = sorted(data["belief_error"].unique())
    changed = table.assign(change=table["relative"] - 1)
    before = changed[changed["belief_error"] == errors[-2]].set_index(CASE)["relative"]
    shown = changed[changed["belief_error"] == largest].join(before.rename("before"), on=CASE)

    def texts(row: pd.Series) -> list[str]:
        mean, low, high = (float(row[end]) for end in ENDS)
        before = float(row["before"])
        both = Interval(before, before, before, 1), Interval(mean, low, high, row["num_ok"])
        return [change(each).removesuffix("%") for each in both]

    figure = draw_metric(data, shown, "change", [f"% at {errors[-2]:g}", f"% at {largest:g}"], texts)
    say(figure, _message(data, shown, largest))
    return figure, table


def _message(data: pd.DataFrame, shown: pd.DataFrame, largest: float) -> str:
    means = shown.groupby("strategy", sort=False)["relative"].mean().dropna()
    if means.empty:
        return "No strategy has a result with and without errors."
    labels = names(data, "strategy")
    unaffected = [labels[str(name)] for name, ratio in means.items() if abs(ratio - 1) < UNAFFECTED]
    said = f"Estimates wrong by up to {100 * largest:g}% slow down {labels[str(means.idxmax())]} most: "
    said += f"{100 * (means.max() - 1):+.0f}% time, mean over {count(shown.groupby(CASE[:2]).ngroups, 'job')}."
    return said + (f" Below {100 * UNAFFECTED:g}%: {listing(unaffected)}." if unaffected else "")
