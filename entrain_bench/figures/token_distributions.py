"""Tokens per sample in the encoders and in the LLM, by trace.

Corresponds to arXiv:2605.27918, Figure 3; traces of ``experiments/figure/token_distributions.yaml``. A point is the
share of samples with at most this number of tokens.
"""

from functools import partial
from typing import Any

import pandas as pd
import seaborn as sns
from matplotlib.ticker import NullLocator

from entrain_bench.answers.analysis import analyse, token_quantiles
from entrain_bench.answers.labels import names
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, NUMBER_FORMAT, Picture, legend_above, palette, panels

EXPERIMENT = "token_distributions"
RUNS = False
PANELS = {"encoder_tokens": "encoder tokens per sample", "llm_tokens": "LLM tokens per sample"}

load = partial(analyse, compute=token_quantiles, num_samples=8192, num_points=401)


def draw(data: pd.DataFrame) -> Picture:
    """Two panels of cumulative distributions, one line a trace; every other one is dashed."""
    labels = names(data, "workload")
    colours = palette(labels)
    dashes = {name: (3, 1) if place % 2 else (1, 0) for place, name in enumerate(labels)}
    figure, axes = panels(1, 2, DOUBLE_COLUMN_IN, 2.3, sharey=True)
    look: dict[str, Any] = {"palette": colours, "dashes": dashes, "drawstyle": "steps-post", "estimator": None}
    for panel, (column, title) in zip(axes, PANELS.items(), strict=True):
        # A sample without tokens counts at the left edge of a logarithmic axis.
        rows = data.assign(tokens=data[column].clip(lower=1))
        sns.lineplot(rows, x="tokens", y="probability", hue="workload", style="workload", ax=panel, sort=False, **look)
        lines, _ = panel.get_legend_handles_labels()
        panel.legend().remove()
        panel.set(xscale="log", xlabel=title, ylabel="", ylim=(0, 1))
        panel.set_xlim(max(1, 0.8 * data[column][data[column] > 0].min()), 1.25 * data[column].max())
        panel.xaxis.set_major_formatter(NUMBER_FORMAT)
        panel.xaxis.set_minor_locator(NullLocator())
    axes[0].set_ylabel("share of samples")
    for line, label in zip(lines, labels.values(), strict=True):
        line.set_label(label)
    legend_above(figure, lines, columns=4)
    medians = data[data["probability"] >= 0.5].groupby("workload", sort=False)["llm_tokens"].first()
    least, most = map(str, (medians.idxmin(), medians.idxmax()))
    ends = " and ".join(f"{medians[name]:,.0f} on {labels[name]}" for name in (least, most))
    message = f"Number of LLM tokens in the median sample: {ends}."
    return Picture(figure, data[["workload", "probability", *PANELS]], message)
