"""Tokens per sample in the encoders and in the LLM, by trace.

Corresponds to arXiv:2605.27918, Figure 3; traces of ``experiments/figure/token_distributions.yaml``. A point is the
share of samples with at most so many tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from entrain_bench.answers.analysis import analyse, token_quantiles
from entrain_bench.answers.labels import names
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, NUMBER_FORMAT, legend_above, palette, panels, say
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results

EXPERIMENT = "token_distributions"
RUNS = False
NUM_SAMPLES = 8192
NUM_POINTS = 401
PANELS = {"encoder_tokens": "Encoder tokens per sample", "llm_tokens": "LLM tokens per sample"}
# Where more traces than this share a panel, every other one is dashed.
MAX_SOLID = 4


def load(cells: Sequence[Cell], _: Results) -> pd.DataFrame:
    """Token quantiles of every trace."""
    return analyse(cells, token_quantiles, num_samples=NUM_SAMPLES, num_points=NUM_POINTS)


def draw(data: pd.DataFrame) -> tuple[Figure, pd.DataFrame]:
    """Two panels of cumulative distributions, one line a trace."""
    labels = names(data, "workload")
    colours = palette(labels)
    styles: dict[str, Literal["-", "--"]] = {
        name: "--" if len(labels) > MAX_SOLID and place % 2 else "-" for place, name in enumerate(labels)
    }
    figure, axes = panels(1, 2, DOUBLE_COLUMN_IN, 2.3, sharey=True)
    for panel, (column, title) in zip(axes, PANELS.items(), strict=True):
        for name, rows in data.groupby("workload", sort=False):
            # A sample without tokens counts at the left edge of a logarithmic axis.
            tokens = rows[column].clip(lower=1)
            panel.plot(tokens, rows["probability"], styles[str(name)], color=colours[str(name)], drawstyle="steps-post")
        panel.set(xscale="log", xlabel=title, ylim=(0, 1))
        panel.set_xlim(max(1, 0.8 * data[column][data[column] > 0].min()), 1.25 * data[column].max())
        panel.xaxis.set_major_formatter(NUMBER_FORMAT)
        panel.xaxis.set_minor_locator(NullLocator())
    axes[0].set_ylabel("Share of samples")
    handles = [Line2D([], [], color=colours[name], linestyle=styles[name], label=labels[name]) for name in labels]
    legend_above(figure, handles, columns=min(len(handles), 8))
    medians = data[data["probability"] >= 0.5].groupby("workload", sort=False)["llm_tokens"].first()
    least = str(medians.idxmin())
    most = str(medians.idxmax())
    ends = " and ".join(f"{medians[name]:,.0f} on {labels[name]}" for name in (least, most))
    say(figure, f"Number of LLM tokens in the median sample: {ends}.")
    return figure, data[["workload", "probability", *PANELS]]
