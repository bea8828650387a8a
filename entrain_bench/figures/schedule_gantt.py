"""Schedules of the strategies on one global batch: the passes of every stage of a replica over time.

Corresponds to arXiv:2605.27918, Figure 12; cells of ``experiments/figure/schedule_gantt.yaml``. Each strategy shows its
slowest replica in the first iteration, or the ranks of a widest group, where a group is one bar with its degrees. A
deferred part is a part of a microbatch after its first: the encoder work of samples whose LLM microbatch comes later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from entrain_bench.answers.labels import names, spell
from entrain_bench.answers.tables import Runs, run_actions, run_table
from entrain_bench.answers.text import seconds
from entrain_bench.base.errors import UserError
from entrain_bench.figures._style import (
    DOUBLE_COLUMN_IN,
    INK,
    Colour,
    darker,
    legend_above,
    lighter,
    palette,
    panels,
    say,
    show_reason,
)
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results
from entrain_bench.specs.module_layers import Role

EXPERIMENT = "schedule_gantt"
RUNS = True
TIMELINES = True
# The part of the longest schedule that is shown enlarged.
ZOOM = (0.22, 0.42)
LANE_IN = 0.108
TITLE_IN = 0.18
LEGEND_ROWS = 2
# Bars of groups have their degrees in them where a letter has this part of a panel.
LETTER = 0.013
SMALLEST_PT = 5.0
STEP = "Gradient sync and optimizer"
STEP_COLOUR: Colour = (0.6, 0.6, 0.6)
PASSES = {"forward": "forward", "backward": "backward", "weight": "weights"}
MICROBATCH = ["replica", "module", "microbatch"]


def load(cells: Sequence[Cell], results: Results) -> Runs:
    """The table of the runs and their timelines."""
    return Runs(run_table(cells, results), run_actions(cells, results))


def draw(data: Runs) -> tuple[Figure, pd.DataFrame]:
    """A row a strategy: its whole schedule over one time axis for all, and a part of it enlarged."""
    if data.actions.empty:
        raise UserError("figure=schedule_gantt: no run of the sweep has a timeline")
    labels = names(data.table, "strategy")
    bars = {str(name): slowest_replica(rows) for name, rows in data.actions.groupby("strategy", sort=False)}
    colours = colours_of(pd.concat(bars.values()))
    lanes = [bars[name]["lane"].nunique() if name in bars else 2 for name in labels]
    height = 1.0 + sum(LANE_IN * count + TITLE_IN for count in lanes)
    heights = [LANE_IN * count for count in lanes]
    figure, axes = panels(
        len(labels), 2, DOUBLE_COLUMN_IN, height, sharex="col", gridspec_kw={"height_ratios": heights}
    )
    longest = max(rows["end_s"].max() for rows in bars.values())
    whole = (0.0, 1.01 * longest)
    part = (ZOOM[0] * longest, ZOOM[1] * longest)
    for name, overview, enlarged in zip(labels, axes[::2], axes[1::2], strict=True):
        overview.set_title(labels[name], loc="left")
        if name not in bars:
            run = data.table[data.table["strategy"] == name].iloc[0]
            reason = "no timeline kept" if run["status"] == "ok" else f"{run['status']}: {run['reason']}"
            show_reason(overview, reason)
            show_reason(enlarged, "")
            continue
        overview.set_title(f"{bars[name]['end_s'].max():.3f} s", loc="right")
        draw_lanes(overview, bars[name], colours, whole)
        draw_lanes(enlarged, bars[name], colours, part)
        enlarged.set_yticks([])
        # Outlines what the enlarged panels show.
        low, high = sorted(overview.get_ylim())
        corner = (part[0], low)
        size = (part[1] - part[0], high - low)
        overview.add_patch(Rectangle(corner, *size, fill=False, edgecolor=INK, linewidth=0.8))
    axes[1].set_title("enlarged", loc="right")
    for last in axes[-2:]:
        last.set_xlabel("Time (s)")
    handles = [Patch(facecolor=colour, label=label) for label, colour in colours.items()]
    legend_above(figure, handles, columns=-(-len(handles) // LEGEND_ROWS))
    ends = {name: float(rows["end_s"].max()) for name, rows in bars.items()}
    least = min(ends, key=ends.__getitem__)
    most = max(ends, key=ends.__getitem__)
    said = " and ".join(f"{seconds(ends[name])} s with {labels[name]}" for name in (least, most))
    say(figure, f"The same batch takes {said}.")
    columns = ["strategy", "lane", "stage", "module", "pass", "microbatch", "part", "deferred", "start_s", "end_s"]
    shown = pd.concat([rows.assign(strategy=name) for name, rows in bars.items()])
    return figure, shown[[*columns, *["group"] * ("group" in shown)]]


def slowest_replica(actions: pd.DataFrame) -> pd.DataFrame:
    """The lanes of the replica whose last pass ends last, with ``deferred`` (see the module) and ``kind``."""
    mine = extreme_replica(actions, "end_s")
    first = mine.groupby(MICROBATCH)["part"].transform("min")
    deferred = (mine["side"] == "encoder") & (mine["part"] > first)
    kinds = [
        f"{spell(module)} {PASSES[kind]}{', deferred' if later else ''}" if kind in PASSES else STEP
        for module, kind, later in zip(mine["module"], mine["pass"], deferred, strict=True)
    ]
    return mine.assign(deferred=deferred, kind=kinds)


def colours_of(actions: pd.DataFrame) -> dict[str, Colour]:
    """A hue for each module, and one for deferred parts: light is forward, full backward, dark weights, grey steps."""
    modules = [spell(name) for name in actions.sort_values("side")["module"].unique()]
    hues = palette([*modules, "deferred"])
    colours = {}
    for module in modules:
        for suffix, hue in (("", hues[module]), (", deferred", hues["deferred"])):
            colours[f"{module} forward{suffix}"] = lighter(hue)
            colours[f"{module} backward{suffix}"] = hue
            colours[f"{module} weights{suffix}"] = darker(hue)
    colours[STEP] = STEP_COLOUR
    present = set(actions["kind"])
    return {kind: colour for kind, colour in colours.items() if kind in present}


def draw_lanes(panel: Axes, rows: pd.DataFrame, colours: dict[str, Colour], window: tuple[float, float]) -> None:
    """A bar an action and a row a lane, as far as the time window goes."""
    shown = rows[(rows["end_s"] > window[0]) & (rows["start_s"] < window[1])]
    start = shown["start_s"].to_numpy()
    end = shown["end_s"].to_numpy()
    top = shown["lane"].to_numpy(dtype=np.float64) - 0.44
    bottom = shown["lane"].to_numpy(dtype=np.float64) + 0.44
    if has_groups(rows):
        keys = ["module", "stage", "replica", "microbatch", "part", "pass"]
        lane = shown.groupby(keys)["lane"]
        top = lane.transform("min").to_numpy() - 0.44
        bottom = lane.transform("max").to_numpy() + 0.44
        for each in shown.drop_duplicates(keys).to_dict("records"):
            low = max(each["start_s"], window[0])
            high = min(each["end_s"], window[1])
            text = degrees_of(each["group"])
            if high - low > LETTER * len(text) * (window[1] - window[0]):
                middle = float(lane.get_group(tuple(each[key] for key in keys)).mean())
                style: Any = {"ha": "center", "va": "center", "fontsize": SMALLEST_PT, "clip_on": True}
                panel.text((low + high) / 2, middle, text, **style)
    corners = np.stack([start, top, end, top, end, bottom, start, bottom], axis=1).reshape(-1, 4, 2)
    faces = [colours[kind] for kind in shown["kind"]]
    panel.add_collection(PolyCollection(list(corners), facecolors=faces, edgecolors="white", linewidths=0.1))
    held = rows[rows["replica"] >= 0].drop_duplicates(["lane", "module", "stage"])
    lanes = held.sort_values(["lane", "side", "module", "stage"])
    places = [
        " + ".join(
            f"{spell(str(module))} {', '.join(map(str, own['stage']))}"
            for module, own in stages.groupby("module", sort=False)
        )
        for _, stages in lanes.groupby("lane")
    ]
    if has_groups(rows):
        ranks = rows.drop_duplicates("lane").sort_values("lane")[["rank", "num_ranks"]].itertuples(index=False)
        places = [f"Rank {first}" if count == 1 else f"Ranks {first}-{first + count - 1}" for first, count in ranks]
    panel.set_yticks(range(len(places)), places)
    panel.set_ylim(rows["lane"].max() + 0.6, -0.6)
    panel.set_xlim(*window)
    panel.tick_params(axis="y", length=0)
    panel.grid(visible=False, axis="y")


def has_groups(actions: pd.DataFrame) -> bool:
    """Whether groups of ranks of several widths run a run's actions."""
    return "group" in actions and bool(actions["group"].fillna("").ne("").any())


def degrees_of(group: str) -> str:
    """The degrees of a group named by ``timeline_frame``: ``cp4`` of ``ranks 4-7 cp4``, or nothing of ``rank 3``."""
    return " ".join(str(group).split()[2:])


def extreme_replica(actions: pd.DataFrame, column: str) -> pd.DataFrame:
    """The actions on the lanes of the LLM replica where a column of forwards and backwards is highest."""
    work = actions[(actions["side"] == Role.LLM) & (actions["replica"] >= 0)]
    replicas = work["replica"].unique()
    if has_groups(actions):
        lanes = work.groupby("replica", sort=False)["lane"].nunique()
        replicas = lanes[lanes == lanes.max()].index.to_numpy()
    frames = [replica_lanes(actions, replica) for replica in replicas]
    return max(frames, key=lambda frame: float(frame[frame["replica"] >= 0][column].max()))


def replica_lanes(actions: pd.DataFrame, replica: int) -> pd.DataFrame:
    """The actions, steps included, of the lanes that hold an LLM replica and of the encoder stages that feed it.

    Encoders on lanes of their own with another DP feed the LLM's replicas in order. Lanes are counted from 0, those
    with encoder work first.
    """
    work = actions[actions["replica"] >= 0]
    llm, encoder = (work[work["side"] == side] for side in (Role.LLM, Role.ENCODER))
    lanes = {*llm[llm["replica"] == replica]["lane"]}
    encoding = {*encoder["lane"]}
    if not lanes & encoding:
        feeding = replica * encoder["replica"].nunique() // llm["replica"].nunique()
        lanes |= {*encoder[encoder["replica"] == feeding]["lane"]}
    place = {lane: index for index, lane in enumerate(sorted(lanes, key=lambda lane: (lane not in encoding, lane)))}
    mine = actions[actions["lane"].isin(lanes)]
    return mine.assign(lane=mine["lane"].map(place)).reset_index(drop=True)
