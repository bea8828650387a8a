"""Model TFLOP/s of a GPU against context length, for several shares of vision tokens.

Corresponds to the evaluation of arXiv:2605.27678; cells of ``experiments/figure/context_length.yaml``: samples without
imbalance, every strategy free to choose its degrees. Means over seeds.
"""

from __future__ import annotations

from functools import partial

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from entrain_bench.answers.tables import interval_over_seeds, run_table
from entrain_bench.figures._bars import Grid, draw_lines, line_handles
from entrain_bench.figures._style import facets, legend_above, say

EXPERIMENT = "context_length"
RUNS = True
SETTINGS = {"sequence_tokens": "workload.sequence_tokens", "vision_share": "workload.vision_share"}
# Context lengths are multiples of 1,024 and written in those.
KIBI = 1024
load = partial(run_table, settings=SETTINGS)


def draw(data: pd.DataFrame) -> tuple[Figure, pd.DataFrame]:
    """A panel a vision share, a line a strategy, context length along x."""
    grid = Grid.of(data)
    table = interval_over_seeds(data, ["model", "strategy", *SETTINGS], "tflops_per_gpu")
    shares = sorted(table["vision_share"].unique())
    figure, axes = facets([*grid.models], shares, 0.4 + 1.7 * len(grid.models), sharey="row")
    lengths = sorted(table["sequence_tokens"].unique())
    for model, share, panel in axes:
        rows = table[(table["model"] == model) & (table["vision_share"] == share)]
        draw_lines(panel, rows, "sequence_tokens", "tflops_per_gpu", "strategy", grid.colours, grid.strategies)
        panel.set_title(f"{grid.models[model]}, {100 * share:g}% vision tokens")
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_locator(FixedLocator(lengths))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens / KIBI:g}K"))
        if share == shares[0]:
            panel.set_ylabel("TFLOP/s of a GPU")
    # After all lines: panels of a row share limits.
    for _, _, panel in axes:
        panel.set_ylim(bottom=0)
    figure.supxlabel("Context length (tokens)", fontsize="medium")
    legend_above(figure, line_handles(grid.colours, grid.strategies))
    say(figure, _message(grid, table))
    return figure, table


def _message(grid: Grid, table: pd.DataFrame) -> str:
    """The greatest gain over the first strategy."""
    first = next(iter(grid.strategies))
    keys = ["model", *SETTINGS]
    base = table[table["strategy"] == first].set_index(keys)["tflops_per_gpu"]
    gains = table.join(base.rename("base"), on=keys)
    gains = gains.assign(gain=gains["tflops_per_gpu"] / gains["base"]).dropna(subset="gain")
    if gains.empty:
        return f"{grid.strategies[first]} has no result to compare with."
    best = gains.sort_values("gain", ascending=False, kind="stable").to_dict("records")[0]
    where = f"{best['sequence_tokens'] / KIBI:g}K tokens, {100 * best['vision_share']:g}% of them vision"
    winner = grid.strategies[best["strategy"]]
    gain = f"{best['gain']:.2f}x the throughput of {grid.strategies[first]}"
    return f"{winner} reaches up to {gain}: at {where}."
