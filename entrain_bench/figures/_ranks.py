"""The ranks of one run, side by side: their memory against the budget, and what they spend the iteration on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from entrain_bench.figures._style import DOUBLE_COLUMN_IN, GRID, INK, palette, small_png
from entrain_bench.records.records import Record, Results

GIB = 2**30
COMPUTED = ("forward", "backward", "optimizer")
SYNC = "grad_sync"
PARTS = ("forward", "backward", "communication", "optimizer")
IDLE = "idle"
SHORT = {"communication": "comm.", "optimizer": "step"}
DENSE: Any = {"columnspacing": 0.8, "handlelength": 0.8, "handletextpad": 0.4}
HEIGHT_IN = 2.2
# Of the figure: a layout that solves for its margins takes three times as long as all the rest.
MARGINS = {"left": 0.06, "right": 0.985, "bottom": 0.16, "top": 0.82, "wspace": 0.2}
MAX_TICKS = 8


def ranks_png(results: Results, record: Record) -> bytes:
    """The picture of a run's first iteration, whose timeline is there; the same bytes for the same data."""
    timeline = results.timeline(record)
    assert timeline is not None
    table = rank_table(timeline)
    # None where a profile of the device states it.
    memory_bytes = record.config["cluster"]["device"].get("memory_bytes")
    budget_bytes = None if memory_bytes is None else float(memory_bytes * record.config["memory_fraction"])
    return small_png(lambda: draw(table, budget_bytes))


def rank_table(actions: pd.DataFrame) -> pd.DataFrame:
    """Return the memory (``peak_bytes``, if known) and the shares of time of every lane (``timeline_frame``), by rank.

    Communication is what a rank waits for (``exposed_comm_s``), and the gradients' synchronisation.
    """
    # A weight pass is the rest of a backward.
    actions = actions.assign(**{"pass": actions["pass"].replace("weight", "backward")})
    spent = actions.assign(seconds=actions["end_s"] - actions["start_s"] - actions["comm_s"])
    table = spent.pivot_table("seconds", "rank", "pass", "sum").reindex(columns=[*COMPUTED, SYNC]).fillna(0.0)
    waits_s = (actions["comm_s"] + actions["transfer_wait_s"]).groupby(actions["rank"]).sum()
    table = table.assign(communication=table[SYNC] + waits_s)[[*PARTS]] / float(actions["end_s"].max())
    table[IDLE] = 1 - table.sum(axis="columns")
    if "memory_bytes" in actions:
        table["peak_bytes"] = actions.groupby("rank")["memory_bytes"].max()
    return table.reset_index()


def draw(table: pd.DataFrame, budget_bytes: float | None) -> Figure:
    """Left: peak memory by rank, and the budget. Right: what its time goes into."""
    figure = Figure(figsize=(DOUBLE_COLUMN_IN, HEIGHT_IN))
    left, right = figure.subplots(1, 2, gridspec_kw=MARGINS)
    colours: Mapping[str, Any] = {**palette(PARTS), IDLE: GRID}
    edges = np.arange(len(table) + 1)
    if "peak_bytes" in table:
        left.stairs(table["peak_bytes"] / GIB, edges, fill=True, color=colours["forward"])
    title = "Peak memory (GiB)"
    if budget_bytes is not None:
        left.axhline(budget_bytes / GIB, color=INK, linewidth=0.9, linestyle="--")
        title += f"; dashed: budget, {budget_bytes / GIB:.1f} GiB"
    left.set_title(title, loc="left")
    below = np.zeros(len(table))
    for part in (*PARTS, IDLE):
        above = below + table[part].to_numpy()
        mean = f"{SHORT.get(part, part)} {100 * table[part].mean():.0f}%"
        right.stairs(above, edges, baseline=below, fill=True, color=colours[part], label=mean)
        below = above
    right.set_ylim(0, 1)
    right.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    right.set_ylabel("Share of the first iteration")
    right.legend(loc="lower left", bbox_to_anchor=(-0.03, 0.98), ncols=3, **DENSE)
    step = -(-len(table) // MAX_TICKS)
    for panel in (left, right):
        panel.set_xticks(np.arange(0, len(table), step) + 0.5, [str(rank) for rank in table["rank"][::step]])
        panel.set(xlim=(0, len(table)), xlabel="Rank")
        panel.grid(visible=False, axis="x")
    return figure
