"""Predicted against published times of the ledger, by source, and the errors of each source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from entrain_bench.base.arrays import FloatArray
from entrain_bench.figures import _style as style
from entrain_bench.figures._style import FAINT, GRID, INK, Colour
from entrain_bench.lab.ledger.summary import NEAR

HEIGHT_IN = 2.7
# Marks of many rows lie on each other.
MARK: Mapping[str, Any] = {"marker": "o", "ms": 2.5, "ls": "", "alpha": 0.5}


def draw(rows: pd.DataFrame, names: Mapping[str, str]) -> style.Picture:
    """Left: a mark a run, on logarithmic axes. Right: the ratios of each source, in increasing order.

    Args:
        rows: with ``source``, ``published_s``, ``predicted_s`` and ``ratio``; others are left out.
        names: what a source is called.
    """
    timed = rows[rows["ratio"].notna()]
    if timed.empty:
        return style.empty_figure("no row has both times")
    sources = [*dict.fromkeys(timed["source"])]
    colours = style.palette(sources)
    figure, (times, ratios) = style.panels(1, 2, style.DOUBLE_COLUMN_IN, HEIGHT_IN)
    _draw_times(times, timed, colours)
    _draw_ratios(ratios, timed, colours)
    labels = [names.get(source, source) for source in sources]
    handles = [
        Line2D([], [], color=colours[source], label=label, marker="o", ls="", ms=4)
        for source, label in zip(sources, labels, strict=True)
    ]
    style.legend_above(figure, handles)
    near = float((timed["ratio"].sub(1.0).abs() <= NEAR).mean())
    message = f"{near:.0%} of {len(timed):,} published times are within {NEAR:.0%} of their predicted range."
    return style.Picture(figure, timed, message)


def _draw_times(panel: Axes, timed: pd.DataFrame, colours: Mapping[str, Colour]) -> None:
    both = timed[["published_s", "predicted_s"]]
    ends = np.array([0.8 * both.min().min(), 1.25 * both.max().max()])
    panel.fill_between(ends, (1 - NEAR) * ends, (1 + NEAR) * ends, color=GRID, alpha=0.5, lw=0)
    panel.plot(ends, ends, color=FAINT, linewidth=0.6)
    for source, own in timed.groupby("source", sort=False):
        panel.plot(own["published_s"], own["predicted_s"], color=colours[str(source)], **MARK)
    panel.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="Published (s)", ylabel="Predicted (s)")


def _draw_ratios(panel: Axes, timed: pd.DataFrame, colours: Mapping[str, Colour]) -> None:
    panel.axhspan(1 - NEAR, 1 + NEAR, color=GRID, alpha=0.5, linewidth=0)
    panel.axhline(1.0, color=FAINT, linewidth=0.6)
    for place, (source, own) in enumerate(timed.groupby("source", sort=False)):
        ratios = np.sort(own["ratio"].to_numpy())
        panel.plot(place + _spread(ratios), ratios, color=colours[str(source)], **MARK)
        middle = float(np.median(ratios))
        panel.plot([place - 0.4, place + 0.4], [middle, middle], color=INK, linewidth=1.0)
    panel.set_xticks([])
    panel.grid(visible=False, axis="x")
    panel.set(ylabel="Predicted / published", xlabel="Source, runs from lowest to highest ratio; line: median")


def _spread(values: FloatArray) -> FloatArray:
    """Places of values in order, from -0.35 to 0.35."""
    return np.linspace(-0.35, 0.35, len(values)) if len(values) > 1 else np.zeros(len(values))
