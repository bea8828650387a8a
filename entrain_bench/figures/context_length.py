"""Model TFLOP/s of a GPU against context length, for several shares of vision tokens.

Corresponds to the evaluation of arXiv:2605.27678; cells of ``experiments/figure/context_length.yaml``: samples without
imbalance, every strategy free to choose its degrees. Means over seeds.
"""

from functools import partial

import pandas as pd
from matplotlib.ticker import NullLocator

from entrain_bench.answers.labels import names
from entrain_bench.answers.tables import interval_over_seeds, lacking, run_table
from entrain_bench.figures._forms import handles, lines
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, Picture, legend_above, panels, system_colours

EXPERIMENT = "context_length"
RUNS = True
SETTINGS = {"sequence_tokens": "workload.sequence_tokens", "vision_share": "workload.vision_share"}
# Context lengths are multiples of 1,024 and written in those.
KIBI = 1024
load = partial(run_table, settings=SETTINGS)


def draw(data: pd.DataFrame) -> Picture:
    """A panel a model and vision share, a line a strategy, context length along x."""
    strategies, models = (names(data, column) for column in ("strategy", "model"))
    colours = system_colours(data)
    keys = ["model", *SETTINGS]
    table = interval_over_seeds(data, ["strategy", *keys], "tflops_per_gpu")
    places = [(model, share) for model in models for share in sorted(table["vision_share"].unique())]
    columns = len(places) // len(models)
    figure, axes = panels(len(models), columns, DOUBLE_COLUMN_IN, 0.4 + 1.7 * len(models), sharey="row")
    ticks = sorted(table["sequence_tokens"].unique())
    for panel, (model, share) in zip(axes, places, strict=True):
        rows = table[(table["model"] == model) & (table["vision_share"] == share)]
        lines(panel, rows, "sequence_tokens", "tflops_per_gpu", "strategy", colours, strategies)
        panel.set_title(f"{models[model]}, {100 * share:g}% vision tokens")
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [f"{tokens / KIBI:g}K" for tokens in ticks])
        panel.xaxis.set_minor_locator(NullLocator())
        panel.set_ylim(bottom=0)
    figure.supylabel("TFLOP/s of a GPU")
    figure.supxlabel("context length (tokens)")
    legend_above(figure, handles(colours, strategies))
    first, label = next(iter(strategies.items()))
    base = table[table["strategy"] == first].set_index(keys)["tflops_per_gpu"].rename("base")
    gains = table.join(base, on=keys)
    gains = gains.assign(gain=gains["tflops_per_gpu"] / gains["base"]).dropna(subset="gain")
    message = f"{label} has no result to compare with."
    for best in gains.sort_values("gain", ascending=False, kind="stable").to_dict("records")[:1]:
        message = f"{strategies[best['strategy']]} reaches up to {best['gain']:.2f}x the throughput of {label}: at "
        message += f"{best['sequence_tokens'] / KIBI:g}K tokens, {100 * best['vision_share']:g}% of them vision."
    return Picture(figure, table, message + lacking(table, strategies))
