"""Predicted against published times of the ledger, by source, and the errors of each source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.lines import Line2D

from entrain_bench.figures import _style as style
from entrain_bench.figures._style import FAINT, GRID, INK
from entrain_bench.lab.ledger.tables import NEAR

HEIGHT_IN = 2.7


def draw(rows: pd.DataFrame, names: Mapping[str, str]) -> style.Picture:
    """Left: a mark a run, on logarithmic axes. Right: the ratios of each source, with their median.

    Args:
        rows: with ``source``, ``published_s``, ``predicted_s`` and ``ratio``; others are left out.
        names: what a source is called.
    """
    timed = rows[rows["ratio"].notna()]
    if timed.empty:
        return style.empty_figure("no row has both times")
    colours = style.palette(dict.fromkeys(timed["source"]))
    figure, (times, ratios) = style.panels(1, 2, style.DOUBLE_COLUMN_IN, HEIGHT_IN)
    both = timed[["published_s", "predicted_s"]]
    ends = np.array([0.8 * both.min().min(), 1.25 * both.max().max()])
    times.fill_between(ends, (1 - NEAR) * ends, (1 + NEAR) * ends, color=GRID, alpha=0.5, lw=0)
    times.plot(ends, ends, color=FAINT, linewidth=0.6)
    # Marks of many rows lie on each other.
    mark: dict[str, Any] = {"hue": "source", "palette": colours, "alpha": 0.5, "linewidth": 0, "legend": False}
    sns.scatterplot(timed, x="published_s", y="predicted_s", s=8, ax=times, **mark)
    times.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="Published (s)", ylabel="Predicted (s)")
    ratios.axhspan(1 - NEAR, 1 + NEAR, color=GRID, alpha=0.5, linewidth=0)
    ratios.axhline(1.0, color=FAINT, linewidth=0.6)
    # In the order of their rows, so that marks never move by chance.
    order = timed.groupby("source", sort=False)["ratio"]
    places = order.ngroup() - 0.35 + 0.7 * order.rank(method="first", pct=True)
    sns.scatterplot(timed, x=places, y="ratio", s=8, ax=ratios, **mark)
    for place, middle in enumerate(order.median()):
        ratios.plot([place - 0.4, place + 0.4], [middle, middle], color=INK, linewidth=1.0)
    ratios.set_xticks([])
    ratios.grid(visible=False, axis="x")
    ratios.set(ylabel="Predicted / published", xlabel="Source, runs from lowest to highest ratio; line: median")
    labels = ((colour, names.get(source, source)) for source, colour in colours.items())
    handles = [Line2D([], [], color=colour, label=label, marker="o", ls="", ms=4) for colour, label in labels]
    style.legend_above(figure, handles, columns=4)
    near = float((timed["ratio"].sub(1.0).abs() <= NEAR).mean())
    message = f"{near:.0%} of {len(timed):,} published times are within {NEAR:.0%} of their predicted range."
    return style.Picture(figure, timed, message)
