"""Encoder share of the estimated workload: of single samples, and of growing batches.

Corresponds to arXiv:2605.27918, Figures 4 and 5; traces of ``experiments/figure/token_distributions.yaml``. The band
holds 90% of the samples, or of the batches of a size; the line is the median.
"""

from functools import partial
from typing import Any

import pandas as pd
from matplotlib.ticker import NullLocator

from entrain_bench.answers.analysis import analyse, share_quantiles
from entrain_bench.answers.labels import names
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, INK, NUMBER_FORMAT, Picture, lighter, palette, panels

EXPERIMENT = "token_distributions"
RUNS = False
LOW, QUARTER, MEDIAN, THREE_QUARTERS, HIGH = PROBABILITIES = [0.05, 0.25, 0.5, 0.75, 0.95]
COLUMNS = 4
BATCH_TICKS = [1, 16, 256]


DRAWN: dict[str, Any] = {"batch_sizes": [2**power for power in range(11)], "num_draws": 200, "num_samples": 8192}
load = partial(analyse, compute=share_quantiles, probabilities=PROBABILITIES, **DRAWN)


def draw(data: pd.DataFrame) -> Picture:
    """A panel a trace, batch size along x."""
    labels = names(data, "workload")
    colours = palette(labels)
    columns = min(COLUMNS, len(labels))
    rows = -(-len(labels) // columns)
    figure, axes = panels(rows, columns, DOUBLE_COLUMN_IN, 0.4 + 1.15 * rows, sharex=True, sharey=True)
    wide = data.pivot_table("encoder_share", ["workload", "batch_size"], "probability", sort=False)
    for panel, (name, label) in zip(axes, labels.items(), strict=False):
        shares = wide.loc[name].drop(index=0)
        size = shares.index
        panel.fill_between(size, shares[LOW], shares[HIGH], color=lighter(colours[name], 0.7), linewidth=0)
        panel.fill_between(size, shares[QUARTER], shares[THREE_QUARTERS], color=lighter(colours[name]), linewidth=0)
        panel.plot(size, shares[MEDIAN], color=INK)
        panel.set_xscale("log", base=2)
        panel.set_xticks([tick for tick in BATCH_TICKS if tick <= size.max()])
        panel.xaxis.set_major_formatter(NUMBER_FORMAT)
        panel.xaxis.set_minor_locator(NullLocator())
        panel.set(xlim=(size.min(), size.max()), title=label)
    for panel in axes[len(labels) :]:
        panel.set_visible(False)
    figure.supylabel("Encoder share")
    figure.supxlabel("Batch size (samples)")
    # The trace whose samples differ most, and how much its largest batches still do.
    spread = 100 * (wide[HIGH] - wide[LOW]).unstack()
    largest = spread.columns.max()
    name = str(spread[0].idxmax())
    message = (
        f"Batches even out the encoder share: on {labels[name]}, that of 90% of the samples spans "
        f"{spread[0][name]:.0f} percentage points, that of 90% of the batches of {largest} samples spans "
        f"{spread[largest][name]:.1f}."
    )
    table = data[["workload", "batch_size", "num_draws", "probability", "encoder_share"]]
    return Picture(figure, table, message)
