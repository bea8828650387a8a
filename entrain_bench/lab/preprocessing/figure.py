"""Who makes inputs: what ranks wait for them, iteration times, and CPU time, over what a picture takes to decode."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from entrain_bench.answers.statistics import Interval, mean_interval, ratio_interval
from entrain_bench.figures._bars import interval_handle
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, FAINT, FONT_PT, INK, legend_above, palette, panels
from entrain_bench.lab.preprocessing.measure import BATCH, NUM_RANKS, Prepared
from entrain_bench.train.settings import PREPROCESSING

LABELS = {"inline": "The rank itself", "thread": "A thread of each rank", "processes": "A process apart"}
QUANTITIES = ("input_stall_s", "iteration_time_s", "cpu_s")
# What the others are compared with, repetition by repetition: a machine's speed changes over minutes.
COMPARED_WITH = "inline"
PANELS = {
    "input_stall_s": "Wait for inputs (s an iteration)",
    "iteration_time_s_ratio": "Iteration time, relative",
    "cpu_s_ratio": "CPU time of the run, relative",
}
FILLED = 0.8


def summary(runs: pd.DataFrame, pictures: Sequence[Prepared]) -> pd.DataFrame:
    """Means over repetitions with 95% intervals, a row a size and way to make inputs.

    Columns ``*_ratio`` are geometric means of ratios to ``COMPARED_WITH`` in the same repetition.
    """
    rows = []
    for prepared in pictures:
        of_size = runs[runs["size"] == prepared.name].sort_values("repetition", kind="stable")
        other = of_size[of_size["preprocessing"] == COMPARED_WITH]
        for mode in PREPROCESSING:
            own = of_size[of_size["preprocessing"] == mode]
            row: dict[str, object] = {
                "size": prepared.name,
                "picture_kb": prepared.picture_bytes / 1e3,
                "decode_ms": prepared.decode_s * 1e3,
                "preprocessing": mode,
                "repetitions": len(own),
                "load_average": own["load"].mean(),
            }
            for name in QUANTITIES:
                row |= _columns(name, mean_interval(own[name].tolist()))
            for name in QUANTITIES[1:]:
                row |= _columns(f"{name}_ratio", ratio_interval(own[name].tolist(), other[name].tolist()))
            rows.append(row)
    return pd.DataFrame(rows)


def _columns(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}


def draw(table: pd.DataFrame, cores: int) -> tuple[Figure, pd.DataFrame]:
    """A panel a quantity, a group of bars a size of pictures."""
    figure, axes = panels(1, len(PANELS), DOUBLE_COLUMN_IN, 2.2)
    colours = palette(PREPROCESSING)
    for panel, (name, title) in zip(axes, PANELS.items(), strict=True):
        panel.set_title(title)
        _draw_bars(panel, table, name, colours)
    handles: list[Artist] = [Patch(facecolor=colours[mode], label=LABELS[mode]) for mode in PREPROCESSING]
    handles += interval_handle(table.rename(columns={"repetitions": "num_ok"}))
    legend_above(figure, handles)
    load = f"load average {table['load_average'].min():.0f} to {table['load_average'].max():.0f}"
    figure.supxlabel(
        f"{NUM_RANKS} ranks and, in the last case, a producer on {cores} cores ({load}); "
        f"{BATCH} pictures an iteration, with the bytes and the CPU time to decode of one;\n"
        f"relative to the rank itself, whose times stand below; {table['repetitions'].min()} repetitions, in turn",
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
    if name.endswith("_ratio"):
        panel.axhline(1, color=INK, linewidth=0.5)
    panel.set_xticks(range(len(sizes)), [_label(table[table["size"] == size], name) for size in sizes])
    panel.tick_params(axis="x", length=0)
    panel.grid(visible=False, axis="x")
    panel.set_ylim(bottom=0)


def _label(rows: pd.DataFrame, name: str) -> str:
    """A size, and what decides there: a picture's cost, or the time that others are relative to."""
    size = str(rows["size"].iloc[0]).replace("x", " x ")
    if name.endswith("_ratio"):
        own = rows[rows["preprocessing"] == COMPARED_WITH].iloc[0]
        return f"{size}\n{own[name.removesuffix('_ratio')]:.1f} s"
    return f"{size}\n{rows['picture_kb'].iloc[0]:.0f} kB\n{rows['decode_ms'].iloc[0]:.0f} ms"
