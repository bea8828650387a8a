"""Model TFLOP/s of a GPU against context length, for several shares of vision tokens.

Corresponds to the evaluation of arXiv:2605.27678; cells of ``experiments/figure/context_length.yaml``: samples without
imbalance, every strategy free to choose its degrees. Means over seeds.
"""

from functools import partial

import pandas as pd
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from entrain_bench.answers.labels import names
from entrain_bench.answers.tables import interval_over_seeds, lacking, run_table
from entrain_bench.figures import _style as style

EXPERIMENT = "context_length"
RUNS = True
SETTINGS = {"sequence_tokens": "workload.sequence_tokens", "vision_share": "workload.vision_share"}
# Context lengths are multiples of 1,024 and written in those.
KIBI = 1024
load = partial(run_table, settings=SETTINGS)


def draw(data: pd.DataFrame) -> style.Picture:
    """A panel a model and vision share, a line a strategy, context length along x."""
    strategies = names(data, "strategy")
    models = names(data, "model")
    colours = style.system_colours(data)
    table = interval_over_seeds(data, ["model", "strategy", *SETTINGS], "tflops_per_gpu")
    places = [(model, share) for model in models for share in sorted(table["vision_share"].unique())]
    columns = len(places) // len(models)
    height_in = 0.4 + 1.7 * len(models)
    figure, axes = style.panels(len(models), columns, style.DOUBLE_COLUMN_IN, height_in, sharey="row")
    for panel, (model, share) in zip(axes, places, strict=True):
        rows = table[(table["model"] == model) & (table["vision_share"] == share)]
        style.draw_lines(panel, rows, "sequence_tokens", "tflops_per_gpu", "strategy", colours, strategies)
        panel.set_title(f"{models[model]}, {100 * share:g}% vision tokens")
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_locator(FixedLocator(sorted(table["sequence_tokens"].unique())))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens / KIBI:g}K"))
        panel.set_ylim(bottom=0)
    figure.supylabel("TFLOP/s of a GPU")
    figure.supxlabel("Context length (tokens)")
    style.legend_above(figure, style.line_handles(colours, strategies))
    return style.Picture(figure, table, _message(strategies, table) + lacking(table, strategies))


def _message(labels: dict[str, str], table: pd.DataFrame) -> str:
    first = next(iter(labels))
    keys = ["model", *SETTINGS]
    base = table[table["strategy"] == first].set_index(keys)["tflops_per_gpu"]
    gains = table.join(base.rename("base"), on=keys)
    gains = gains.assign(gain=gains["tflops_per_gpu"] / gains["base"]).dropna(subset="gain")
    if gains.empty:
        return f"{labels[first]} has no result to compare with."
    best = gains.sort_values("gain", ascending=False, kind="stable").to_dict("records")[0]
    where = f"{best['sequence_tokens'] / KIBI:g}K tokens, {100 * best['vision_share']:g}% of them vision"
    return (
        f"{labels[best['strategy']]} reaches up to {best['gain']:.2f}x the throughput of {labels[first]}: at {where}."
    )
