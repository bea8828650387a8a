"""Pictures of an answer: a sweep at a glance, one to send, and what the ranks of a run hold and do.

Each is a PNG, the same bytes for the same data.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.commands import commands_of
from entrain_bench.answers.labels import OURS
from entrain_bench.answers.sentences import sentences
from entrain_bench.answers.text import count
from entrain_bench.base.errors import UserError
from entrain_bench.figures._style import (
    DOUBLE_COLUMN_IN,
    FAMILY_COLOURS,
    GRID,
    INK,
    MODEL_ERROR,
    palette,
    ranking,
    small_png,
)
from entrain_bench.figures.iteration_time import DARKEST
from entrain_bench.records.records import Record, Results

# More cases are not readable; the table has them all.
MAX_CASES = 12


def standings_png(answer: Answer) -> bytes:
    """Draw ``draw_standings``."""
    return small_png(lambda: draw_standings(answer))


def draw_standings(answer: Answer) -> Figure:
    """A row a strategy or variant, the fastest on top, a column a case; a star marks those that lack seeds."""
    cases = answer.cases[:MAX_CASES]
    rows = [(answer.case_name(case), row) for case in cases for row in case.results]
    times = [(case, row.name, row.standing.time.mean if row.standing.time else None) for case, row in rows]
    table = pd.DataFrame(times, columns=["case", "name", "seconds"]).astype({"seconds": float})
    wide = table.pivot_table("seconds", "name", "case", sort=False, dropna=False)
    relative = wide / wide.min()
    overall = relative.mean(axis="columns", skipna=False).dropna().to_frame("mean")
    if len(cases) == 1:
        behind = {row.name: row.standing.behind for _, row in rows if row.standing.behind}
        overall["low"] = [behind[name].low if name in behind else 1.0 for name in overall.index]
        overall["high"] = [behind[name].high if name in behind else 1.0 for name in overall.index]
    relative.columns = pd.MultiIndex.from_tuples([("", name) for name in relative.columns])
    lacking = {row.name for _, row in rows if None in row.standing.times.values()}
    labels = {name: f"{name}*" if name in lacking else name for name in relative.index}
    colours = {row.name: FAMILY_COLOURS[OURS if row.family == OURS else "published"] for _, row in rows}
    look: dict[str, Any] = {"label": "time / fastest", "norm": LogNorm(1, DARKEST), "start": 1.0}
    figure = ranking(overall.sort_values("mean", kind="stable"), relative, labels, colours, [], **look)
    if len(cases) < len(answer.cases):
        figure.supxlabel(f"{len(cases)} of {len(answer.cases)} cases; table.csv has all")
    return figure


# Of the picture to send: height of a line of text, letters of one, and sentences and commands that are shown.
LINE_IN = 0.14
LETTERS = 110
MAX_SENTENCES = 3
MAX_COMMANDS = 3


def share_png(answer: Answer, results_dir: str) -> bytes:
    """Draw ``draw_share``; ``UserError`` if there is nothing to compare."""
    if len({row.name for row in answer.results if row.standing.num_ok}) < 2:
        raise UserError("share=true: needs results of at least two strategies for the same job. Run another strategy")
    return small_png(lambda: draw_share(answer, results_dir))


def draw_share(answer: Answer, results_dir: str) -> Figure:
    """The standings below the first sentences of the answer, and above the commands."""
    commands = commands_of(answer.records, results_dir)
    foot = commands[:MAX_COMMANDS]
    more = len(commands) - MAX_COMMANDS
    foot += [f"# and {count(more, 'more command')} in report.md"] if more > 0 else []
    simulated = all(record.labels["harness"] == "simulate" for record in answer.records)
    foot += [f"Simulated; {MODEL_ERROR}"] if simulated else []
    above, below = (
        [line for text in texts for line in textwrap.wrap(text, LETTERS)]
        for texts in (sentences(answer)[:MAX_SENTENCES], foot)
    )
    figure = draw_standings(answer)
    figure.set_size_inches(DOUBLE_COLUMN_IN, figure.get_figheight() + LINE_IN * len([*above, *below]))
    figure.suptitle("\n".join(above), x=0.01, ha="left", fontsize=9)
    figure.supxlabel("\n".join(below), x=0.01, ha="left", fontsize=6.5, family="monospace")
    return figure


GIB = 2**30
COMPUTED = ("forward", "backward", "optimizer")
SYNC = "grad_sync"
PARTS = ("forward", "backward", "communication", "optimizer")
IDLE = "idle"
SHORT = {"communication": "comm.", "optimizer": "step"}
# A layout that solves for its margins takes three times as long as all the rest.
MARGINS = {"left": 0.06, "right": 0.985, "bottom": 0.16, "top": 0.82, "wspace": 0.2}
MAX_TICKS = 8


def ranks_png(results: Results, record: Record) -> bytes:
    """Draw ``draw_ranks`` of a run's first iteration, whose timeline is there."""
    timeline = results.timeline(record)
    assert timeline is not None
    table = rank_table(timeline)
    # None where a profile of the device states it.
    memory_bytes = record.config["cluster"]["device"].get("memory_bytes")
    budget_bytes = None if memory_bytes is None else float(memory_bytes * record.config["memory_fraction"])
    return small_png(lambda: draw_ranks(table, budget_bytes))


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


def draw_ranks(table: pd.DataFrame, budget_bytes: float | None) -> Figure:
    """Left: peak memory by rank, and the budget. Right: what its time goes into."""
    figure = Figure(figsize=(DOUBLE_COLUMN_IN, 2.2))
    left, right = figure.subplots(1, 2, gridspec_kw=MARGINS)
    colours: Mapping[str, Any] = {**palette(PARTS), IDLE: GRID}
    edges = np.arange(len(table) + 1)
    title = "Peak memory (GiB)"
    if "peak_bytes" in table:
        left.stairs(table["peak_bytes"] / GIB, edges, fill=True, color=colours["forward"])
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
    right.set(ylim=(0, 1), ylabel="Share of the first iteration")
    right.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    right.legend(loc="lower left", bbox_to_anchor=(-0.03, 0.98), ncols=3, columnspacing=0.8, handlelength=0.8)
    step = -(-len(table) // MAX_TICKS)
    for panel in (left, right):
        panel.set_xticks(np.arange(0, len(table), step) + 0.5, [str(rank) for rank in table["rank"][::step]])
        panel.set(xlim=(0, len(table)), xlabel="Rank")
    return figure
