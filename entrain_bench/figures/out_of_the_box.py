"""Speedup of available balancers over arrival order, at several pipeline depths.

No figure of a paper: arXiv:2511.00279, pull requests and training scripts each measure one of them on a stack of their
own. Rows of ``experiments/figure/out_of_the_box.yaml`` are stacks, a panel each; the others are compared with the first
strategy, on the same stack, trace and seed. Numbers are geometric means over seeds.
"""

import pandas as pd
from matplotlib.colors import LogNorm

from entrain_bench.answers.labels import names
from entrain_bench.answers.tables import gain_text, run_tables, speedup_table
from entrain_bench.figures._forms import heatmap_of
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, ROW_IN, Picture, panels, show_reason

EXPERIMENT = "out_of_the_box"
RUNS = True
CASE = ["row", "model", "workload", "strategy"]
# Cells without a result, by the state of the runs; those that are ok have nothing to be compared with.
WORDS = {"failed": "fails", "skipped": "-", "missing": "not run", "ok": "n/a"}
# Speedups at which colors end.
EXTREME = 1.6
load = run_tables


def draw(data: pd.DataFrame) -> Picture:
    """A panel a stack and model; balancers from top to bottom, traces side by side."""
    strategies, traces, models = (names(data, column) for column in ("strategy", "workload", "model"))
    table = gains(data)
    first, *balancers = strategies
    shown = table.assign(text=[gain_text(row, WORDS) for row in table.to_dict("records")]).set_index(CASE).sort_index()
    places = [(model, stack) for model in models for stack in data["row"].unique()]
    height_in = 0.65 + len(models) * (0.3 + ROW_IN * max(3, len(balancers)))
    figure, axes = panels(len(models), len(places) // len(models), DOUBLE_COLUMN_IN, height_in, sharey=True)
    for panel, (model, stack) in zip(axes, places, strict=True):
        if balancers:
            one = shown.loc[stack, model].swaplevel()
            rows = {name: strategies[name] for name in balancers}
            heatmap_of(panel, one, rows, traces, "speedup", norm=LogNorm(1 / EXTREME, EXTREME), cmap="vlag_r")
        else:
            show_reason(panel, "nothing to compare")
        panel.set_title(f"{models[model]}, {stack}" if len(models) > 1 else stack)
    figure.supxlabel(f"speedup over {strategies[first]}")
    mine = table[(table["strategy"] != first) & table["speedup"].notna()]
    if mine.empty:
        return Picture(figure, table, "No balancer has a result that can be compared.")
    best = mine.sort_values("speedup", ascending=False, kind="stable").to_dict("records")[0]
    several = mine["num_ok"] > 1
    message = (
        f"Of {len(mine)} combinations of balancer, trace and stack, {(several & (mine['speedup_low'] > 1)).sum()} are "
        f"significantly faster and {(several & (mine['speedup_high'] < 1)).sum()} slower than {strategies[first]}; at "
        f"most {best['speedup']:.2f}x ({strategies[best['strategy']]}, {traces[best['workload']]}, {best['row']}). "
        "A star marks missing seeds, a question mark 95% CIs that include 1; n/a has nothing to compare with."
    )
    return Picture(figure, table, message)


def gains(data: pd.DataFrame) -> pd.DataFrame:
    """Mean iteration times with ``speedup`` over the first strategy on the same stack."""
    first = data[data["strategy"] == data["strategy"].iloc[0]]
    return speedup_table(data, first, CASE, CASE[:-1])
