"""Encoder share of the estimated workload: of single samples, and of growing batches.

Corresponds to arXiv:2605.27918, Figures 4 and 5; traces of ``experiments/figure/token_distributions.yaml``. Bands hold
50% and 90% of the batches of a size.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from entrain_bench.answers.analysis import analyse, share_quantiles
from entrain_bench.answers.labels import names
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, INK, NUMBER_FORMAT, Colour, lighter, palette, say, split
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results

EXPERIMENT = "token_distributions"
RUNS = False
BATCH_SIZES = [2**power for power in range(11)]
NUM_DRAWS = 200
NUM_SAMPLES = 8192
LOW, QUARTER, MEDIAN, THREE_QUARTERS, HIGH = PROBABILITIES = [0.05, 0.25, 0.5, 0.75, 0.95]
COLUMNS = 4
# Letters of a line of a panel's title.
TITLE_LETTERS = 14
BATCH_TICKS = [1, 16, 256]


def load(cells: Sequence[Cell], _: Results) -> pd.DataFrame:
    """Quantiles of the encoders' share for every trace."""
    sizes = {"batch_sizes": BATCH_SIZES, "num_draws": NUM_DRAWS, "num_samples": NUM_SAMPLES}
    return analyse(cells, share_quantiles, **sizes, probabilities=PROBABILITIES)


def draw(data: pd.DataFrame) -> tuple[Figure, pd.DataFrame]:
    """Left: single samples, a box a trace. Right: batches, a panel a trace."""
    labels = names(data, "workload")
    colours = palette(labels)
    columns = min(COLUMNS, len(labels))
    rows = -(-len(labels) // columns)
    figure = Figure(figsize=(DOUBLE_COLUMN_IN, max(1.8, 0.8 + 1.2 * rows)), layout="constrained")
    left, right = split(figure, widths=[1.0, 1.75])
    wide = data.pivot_table(
        index=["workload", "batch_size"], columns="probability", values="encoder_share", sort=False
    ).reset_index("batch_size")
    _draw_samples(left.subplots(), wide[wide["batch_size"] == 0], labels, colours)
    batches = wide[wide["batch_size"] > 0]
    grid = right.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for panel, name in zip(grid.flat, labels, strict=False):
        _draw_batches(panel, batches.loc[[name]], colours[name])
        panel.set_title(textwrap.fill(labels[name], TITLE_LETTERS))
    for panel in grid.flat[len(labels) :]:
        panel.set_visible(False)
    left.suptitle("(a) Single samples", fontsize="medium")
    right.suptitle("(b) Batches", fontsize="medium")
    right.supylabel("Encoder share", fontsize="medium")
    right.supxlabel("Batch size (samples); bands hold 50% and 90% of the batches", fontsize="medium")
    say(figure, _message(wide, labels))
    return figure, data[["workload", "batch_size", "num_draws", "probability", "encoder_share"]]


def _message(shares: pd.DataFrame, labels: dict[str, str]) -> str:
    """The trace whose samples differ most, and how much its largest batches still do."""
    spread = (shares[HIGH] - shares[LOW]).groupby([shares.index, shares["batch_size"]]).first().unstack()
    largest = max(spread.columns)
    name = str(spread[0].idxmax())
    samples, batches = (100 * float(spread[size][name]) for size in (0, largest))
    return (
        f"Batches even out the encoder share: on {labels[name]}, that of 90% of the samples spans "
        f"{samples:.0f} percentage points, that of 90% of the batches of {largest} samples spans "
        f"{batches:.1f}."
    )


def _draw_samples(panel: Axes, shares: pd.DataFrame, labels: dict[str, str], colours: dict[str, Colour]) -> None:
    for place, name in enumerate(labels):
        row = shares.loc[name]
        panel.plot([row[LOW], row[HIGH]], [place, place], color=colours[name], linewidth=1.0)
        box = (row[QUARTER], place - 0.3)
        width = row[THREE_QUARTERS] - row[QUARTER]
        panel.barh(place, width, 0.6, box[0], facecolor=lighter(colours[name]), edgecolor=colours[name], zorder=2)
        panel.plot([row[MEDIAN], row[MEDIAN]], [place - 0.3, place + 0.3], color=INK, linewidth=1.2, zorder=3)
    panel.set_yticks(range(len(labels)), list(labels.values()))
    panel.invert_yaxis()
    panel.grid(visible=False, axis="y")
    panel.set(xlabel="Encoder share of forward time\n(box 50%, line 90% of the samples)")


def _draw_batches(panel: Axes, shares: pd.DataFrame, colour: Colour) -> None:
    size = shares["batch_size"]
    panel.fill_between(size, shares[LOW], shares[HIGH], color=lighter(colour, 0.7), linewidth=0)
    panel.fill_between(size, shares[QUARTER], shares[THREE_QUARTERS], color=lighter(colour, 0.3), linewidth=0)
    panel.plot(size, shares[MEDIAN], color=INK)
    panel.set_xscale("log", base=2)
    panel.set_xticks([tick for tick in BATCH_TICKS if tick <= size.max()])
    panel.xaxis.set_major_formatter(NUMBER_FORMAT)
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xlim(size.min(), size.max())
