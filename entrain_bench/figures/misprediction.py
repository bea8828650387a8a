"""Iteration time with wrong estimates of the work, relative to estimates without error.

No figure of arXiv:2605.27918 or the other papers: their estimates are never wrong by more than their fits. Cells of
``experiments/figure/misprediction.yaml``; an error of e multiplies each sample's estimate by 1 + e u, u uniform in [-1,
1] (docs/costs.md). Values are changes of the time at the largest error, seed by seed. Strategies that assign and order
without estimates stay at 0.
"""

from functools import partial

import pandas as pd

from entrain_bench.answers.labels import names
from entrain_bench.answers.tables import interval_over_seeds, relative_over_seeds, run_table
from entrain_bench.answers.text import count, listing
from entrain_bench.figures._style import Picture, ranking_by

EXPERIMENT = "misprediction"
RUNS = True
CASE = ["workload", "model", "strategy"]
# A change of the time that counts as none.
UNAFFECTED = 0.001
load = partial(run_table, settings={"belief_error": "belief_error"})


def draw(data: pd.DataFrame) -> Picture:
    """A row a strategy, the least affected on top, a column a job."""
    keys = [*CASE, "belief_error"]
    # NaN without a run without error at the same seed.
    ratios = relative_over_seeds(data, data[data["belief_error"] == 0], keys, CASE)
    table = interval_over_seeds(data, keys, "iteration_time_s").join(ratios, on=keys)
    largest = data["belief_error"].max()
    shown = table.assign(change=table["relative"] - 1)[table["belief_error"] == largest]
    figure = ranking_by(data, shown, "change", f"change of time at errors of {largest:.0%}", "{:+.0%}")
    return Picture(figure, table, _message(shown, names(data, "strategy"), largest))


def _message(shown: pd.DataFrame, labels: dict[str, str], largest: float) -> str:
    means = shown.groupby("strategy", sort=False)["relative"].mean().dropna()
    if means.empty:
        return "No strategy has a result with and without errors."
    unaffected = [labels[str(name)] for name, ratio in means.items() if abs(ratio - 1) < UNAFFECTED]
    said = f"Estimates wrong by up to {100 * largest:g}% slow down {labels[str(means.idxmax())]} most: "
    said += f"{100 * (means.max() - 1):+.0f}% time, mean over {count(shown.groupby(CASE[:2]).ngroups, 'job')}."
    return said + (f" Below {100 * UNAFFECTED:g}%: {listing(unaffected)}." if unaffected else "")
