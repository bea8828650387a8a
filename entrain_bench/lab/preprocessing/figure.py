"""Preprocessing in the rank, a thread or a process: waits for inputs, iteration time and CPU time by image size."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.patches import Patch

from entrain_bench.answers.statistics import mean_interval, ratio_interval
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, INK, Picture, legend_above, palette, panels
from entrain_bench.lab.preprocessing.measure import BATCH, NUM_RANKS, Prepared
from entrain_bench.train.settings import PREPROCESSING

LABELS = {"inline": "The rank itself", "thread": "A thread of each rank", "processes": "A separate process"}
QUANTITIES = ("input_stall_s", "iteration_time_s", "cpu_s")
# What the others are compared with, repetition by repetition: a machine's speed changes over minutes.
COMPARED_WITH = "inline"
PANELS = {
    "input_stall_s": "Wait for inputs (s per iteration)",
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
        values = {mode: of_size[of_size["preprocessing"] == mode] for mode in PREPROCESSING}
        for mode, own in values.items():
            found = {name: mean_interval(own[name].tolist()) for name in QUANTITIES}
            for name in QUANTITIES[1:]:
                found[f"{name}_ratio"] = ratio_interval(own[name].tolist(), values[COMPARED_WITH][name].tolist())
            row: dict[str, object] = {
                "size": prepared.name,
                "picture_kb": prepared.picture_bytes / 1e3,
                "decode_ms": prepared.decode_s * 1e3,
                "preprocessing": mode,
                "repetitions": len(own),
                "load_average": own["load"].mean(),
            }
            for name, interval in found.items():
                row |= {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
            rows.append(row)
    return pd.DataFrame(rows)


def draw(table: pd.DataFrame, cores: int) -> Picture:
    """Draw a panel per quantity, with a group of bars per image size."""
    figure, axes = panels(1, len(PANELS), DOUBLE_COLUMN_IN, 2.45)
    colours = palette(PREPROCESSING)
    sizes = dict([*table.groupby("size", sort=False)])
    width = FILLED / len(PREPROCESSING)
    for panel, (name, title) in zip(axes, PANELS.items(), strict=True):
        for step, (mode, own) in enumerate(table.groupby("preprocessing", sort=False)):
            places = [place + (step + 0.5) * width - FILLED / 2 for place in range(len(sizes))]
            panel.bar(places, own[name], 0.9 * width, color=colours[str(mode)])
            ends = own[f"{name}_low"].clip(lower=0), own[f"{name}_high"]
            panel.vlines(places, *ends, color=INK, linewidth=0.7, zorder=3)
        if name.endswith("_ratio"):
            panel.axhline(1, color=INK, linewidth=0.5)
        labels = [f"{size}".replace("x", " x ") + _note(rows, name) for size, rows in sizes.items()]
        panel.set_xticks(range(len(sizes)), labels)
        panel.tick_params(axis="x", length=0)
        panel.grid(visible=False, axis="x")
        panel.set(title=title, ylim=(0, None))
    handles: list[Artist] = [Patch(facecolor=colours[mode], label=LABELS[mode]) for mode in PREPROCESSING]
    legend_above(figure, handles)
    largest = table[table["size"] == [*sizes][-1]].set_index("preprocessing")["iteration_time_s_ratio"]
    best = str(largest.idxmin())
    gain = f"{LABELS[best].lower()} is fastest, {1 / largest[best]:.2f}x over the rank itself"
    said = gain if best != COMPARED_WITH else "nothing is faster than the rank itself"
    load = f"load average {table['load_average'].min():.0f} to {table['load_average'].max():.0f}"
    message = (
        f"Images of {[*sizes][-1].replace('x', ' x ')}: {said}. "
        f"{NUM_RANKS} ranks and, in the last case, a producer on {cores} cores ({load}); {BATCH} images per iteration. "
        "Left: bytes of an image and CPU time to decode it. Middle, right: ratios to the rank itself, with its "
        f"seconds; {table['repetitions'].min()} repetitions, 95% intervals."
    )
    return Picture(figure, table, message)


def _note(rows: pd.DataFrame, name: str) -> str:
    """Below a size, what decides there: a picture's cost, or the time that others are relative to."""
    if name.endswith("_ratio"):
        own = rows[rows["preprocessing"] == COMPARED_WITH].iloc[0]
        return f"\n{own[name.removesuffix('_ratio')]:.1f} s"
    return f"\n{rows['picture_kb'].iloc[0]:.0f} kB\n{rows['decode_ms'].iloc[0]:.0f} ms"
