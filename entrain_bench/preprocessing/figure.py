"""Who makes inputs: what ranks wait for them, iteration times, and CPU time, over what a picture takes to decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from entrain_bench.figures._style import DOUBLE_COLUMN_IN, FAINT, FONT_PT, INK, legend_above, palette, panels
from entrain_bench.preprocessing.measure import BATCH, NUM_RANKS, Prepared
from entrain_bench.records.statistics import mean_interval
from entrain_bench.train.settings import PREPROCESSING

LABELS = {"inline": "The rank itself", "thread": "A thread of each rank", "processes": "A process apart"}
QUANTITIES = {
    "input_stall_s": "Wait for inputs (s an iteration)",
    "iteration_time_s": "Iteration (s)",
    "cpu_s": "CPU time of the run (s)",
}
FILLED = 0.8


def summary(runs: pd.DataFrame, pictures: Sequence[Prepared]) -> pd.DataFrame:
    """Means over repetitions with 95% intervals, a row a size and way to make inputs.

    Args:
        runs: a row a run.
        pictures: what they trained on.
    """
    rows = []
    for prepared in pictures:
        for mode in PREPROCESSING:
            own = runs[(runs["size"] == prepared.size.name) & (runs["preprocessing"] == mode)]
            row: dict[str, object] = {
                "size": prepared.size.name,
                "picture_kb": prepared.made.num_bytes / prepared.num / 1e3,
                "decode_ms": prepared.decode_s * 1e3,
                "preprocessing": mode,
                "repetitions": len(own),
                "load_average": own["load"].mean(),
            }
            for name in QUANTITIES:
                interval = mean_interval(own[name].tolist())
                row |= {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
            rows.append(row)
    return pd.DataFrame(rows)


def draw(table: pd.DataFrame, cores: int) -> tuple[Figure, pd.DataFrame]:
    """A panel a quantity, a group of bars a size of pictures."""
    figure, axes = panels(1, len(QUANTITIES), DOUBLE_COLUMN_IN, 2.2)
    colours = palette(PREPROCESSING)
    for panel, (name, title) in zip(axes, QUANTITIES.items(), strict=True):
        panel.set_title(title)
        _draw_bars(panel, table, name, colours)
    handles: list[Artist] = [Patch(facecolor=colours[mode], label=LABELS[mode]) for mode in PREPROCESSING]
    style: Any = {"color": INK, "linewidth": 0.7, "marker": "|", "linestyle": "", "markersize": 7}
    if (table["repetitions"] > 1).any():
        handles.append(Line2D([], [], label="95 % interval", **style))
    legend_above(figure, handles)
    load = f"load average {table['load_average'].min():.0f} to {table['load_average'].max():.0f}"
    figure.supxlabel(
        f"{NUM_RANKS} ranks and, in the last case, a producer on {cores} cores ({load}); "
        f"{BATCH} pictures an iteration, of these sizes, bytes and CPU times to decode one; "
        f"{table['repetitions'].min()} repetitions",
        fontsize=FONT_PT - 1,
        color=FAINT,
    )
    return figure, table


def _draw_bars(panel: Axes, table: pd.DataFrame, name: str, colours: dict[str, tuple[float, float, float]]) -> None:
    sizes = list(dict.fromkeys(table["size"]))
    width = FILLED / len(PREPROCESSING)
    for step, mode in enumerate(PREPROCESSING):
        own = table[table["preprocessing"] == mode].set_index("size").loc[sizes]
        places = [place + (step + 0.5) * width - FILLED / 2 for place in range(len(sizes))]
        panel.bar(places, own[name], 0.9 * width, color=colours[mode])
        panel.vlines(places, own[f"{name}_low"].clip(lower=0), own[f"{name}_high"], color=INK, linewidth=0.7, zorder=3)
    first = table.drop_duplicates("size").set_index("size").loc[sizes]
    labels = [
        f"{str(size).replace('x', ' x ')}\n{row['picture_kb']:.0f} kB\n{row['decode_ms']:.0f} ms"
        for size, row in first.iterrows()
    ]
    panel.set_xticks(range(len(sizes)), labels)
    panel.tick_params(axis="x", length=0)
    panel.grid(visible=False, axis="x")
    panel.set_ylim(bottom=0)
