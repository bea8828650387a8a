"""Passes of a pipeline's ranks over time: panels of schedules, lanes and bars."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from entrain_bench.answers.labels import spell
from entrain_bench.answers.timelines import STEP, degrees_of, has_groups, kinds_of
from entrain_bench.figures import _style as style

# Heights: of a lane, of a replica of few lanes, of a title, of all around the panels.
LANE_IN = 0.16
REPLICA_IN = 0.28
TITLE_IN = 0.17
AROUND_IN = 0.9
# Shorter iterations have an axis in milliseconds.
SHORT_S = 0.1
# Bars of groups have their degrees in them where a letter has this part of a panel.
LETTER = 0.013
STEP_COLOUR: style.Colour = (0.6, 0.6, 0.6)
PASS = ["module", "stage", "microbatch", "part", "pass", "group"]
# Columns of bars, besides ``GROUPED`` of runs with groups of several widths.
COLUMNS = ["lane", "stage", "module", "side", "pass", "microbatch", "part", "deferred", "start_s", "end_s"]
GROUPED = ["group", "rank", "num_ranks"]


def gantt(
    bars: Mapping[str, pd.DataFrame],
    labels: Mapping[str, str],
    reasons: Mapping[Any, str],
    axes_of: Mapping[str, str],
    lane_in: float = LANE_IN,
) -> Figure:
    """A panel a schedule (``slowest_replica``), from top to bottom, by the order of ``labels``.

    Where a panel has no bars it has its reason; ``axes_of`` names the schedule whose time a panel has as its axis.
    """
    bars = {name: rows.assign(kind=kinds_of(rows)) for name, rows in bars.items()}
    colours = _colours_of(pd.concat(bars.values()))
    ends_s = {name: float(rows["end_s"].max()) for name, rows in bars.items()}
    heights = [max(REPLICA_IN, lane_in * bars[name]["lane"].nunique()) if name in bars else 0.5 for name in labels]
    height_in = AROUND_IN + sum(heights) + TITLE_IN * len(heights)
    figure, panels_of = style.panels(len(labels), 1, style.DOUBLE_COLUMN_IN, height_in, height_ratios=heights)
    following = [*[axes_of.get(name) for name in labels][1:], None]
    for panel, (name, label), after in zip(panels_of, labels.items(), following, strict=True):
        panel.set_title(label, loc="left")
        if name not in bars:
            style.show_reason(panel, reasons[name])
            continue
        end_s = ends_s[axes_of[name]]
        unit, scale = ("ms", 1e3) if end_s < SHORT_S else ("s", 1.0)
        _draw_lanes(panel, bars[name], colours, 1.01 * end_s)
        panel.set_title(f"{scale * ends_s[name]:.3g} {unit}", loc="right")
        panel.xaxis.set_major_formatter(FuncFormatter(lambda time_s, _, scale=scale: f"{scale * time_s:g}"))
        if after == axes_of[name]:
            panel.tick_params(labelbottom=False)
        else:
            panel.set_xlabel(f"time ({unit})")
    style.legend_above(figure, [Patch(facecolor=colour, label=kind) for kind, colour in colours.items()], columns=4)
    return figure


def columns_of(bars: pd.DataFrame) -> list[str]:
    """The columns of bars that a table of them has."""
    return [*COLUMNS, *(GROUPED if has_groups(bars) else ())]


def _colours_of(actions: pd.DataFrame) -> dict[str, style.Colour]:
    """A hue for each module, and one for deferred parts: light is forward, full backward, dark weights, grey steps."""
    modules = [spell(name) for name in actions.sort_values("side")["module"].unique()]
    hues = dict(zip([*modules, "deferred"], style.COLOURBLIND, strict=False))
    colours = {}
    for module in modules:
        for suffix, hue in (("", hues[module]), (", deferred", hues["deferred"])):
            colours[f"{module} forward{suffix}"] = style.mixed(hue, 1.0)
            colours[f"{module} backward{suffix}"] = hue
            colours[f"{module} weights{suffix}"] = style.mixed(hue, 0.0, 0.4)
    colours[STEP] = STEP_COLOUR
    present = set(actions["kind"])
    return {kind: colour for kind, colour in colours.items() if kind in present}


def _draw_lanes(panel: Axes, rows: pd.DataFrame, colours: dict[str, style.Colour], end_s: float) -> None:
    """A bar a pass and a row a lane, from 0 to ``end_s``."""
    top = bottom = rows["lane"]
    if has_groups(rows):
        rows = rows.fillna({"group": ""})
        lane = rows.groupby(PASS)["lane"]
        top, bottom = lane.transform("min"), lane.transform("max")
        _write_degrees(panel, rows.assign(middle=(top + bottom) / 2), end_s)
    start, end = rows["start_s"], rows["end_s"]
    corners = np.stack(
        [start, top - 0.44, end, top - 0.44, end, bottom + 0.44, start, bottom + 0.44], axis=1, dtype=np.float64
    )
    faces = [colours[kind] for kind in rows["kind"]]
    bars = PolyCollection(list(corners.reshape(-1, 4, 2)), facecolors=faces, edgecolors="white", linewidths=0.1)
    panel.add_collection(bars)
    labels = _lane_names(rows)
    panel.set_yticks([*labels], [*labels.values()])
    panel.set(ylim=(rows["lane"].max() + 0.6, -0.6), xlim=(0, end_s))
    panel.tick_params(axis="y", length=0)


def _write_degrees(panel: Axes, rows: pd.DataFrame, end_s: float) -> None:
    for row in rows.drop_duplicates(PASS).to_dict("records"):
        text = degrees_of(row["group"])
        if row["end_s"] - row["start_s"] > LETTER * len(text) * end_s:
            look: dict[str, Any] = {"ha": "center", "va": "center", "clip_on": True}
            panel.text((row["start_s"] + row["end_s"]) / 2, row["middle"], text, **look)


def _lane_names(rows: pd.DataFrame) -> dict[float, str]:
    """Labels by place: ranks of each lane if groups have several widths, else the modules of adjacent lanes."""
    if has_groups(rows):
        ranks = rows.drop_duplicates("lane").sort_values("lane")[["lane", "rank", "num_ranks"]]
        return {
            lane: f"Rank {first}" if count == 1 else f"Ranks {first}-{first + count - 1}"
            for lane, first, count in ranks.itertuples(index=False)
        }
    held = rows[rows["microbatch"] >= 0].sort_values(["side", "module"]).groupby("lane")["module"]
    modules = held.agg(lambda names: " + ".join(spell(str(name)) for name in names.unique()))
    runs = modules.ne(modules.shift()).cumsum()
    return {float(lanes.index.to_numpy().mean()): lanes.iloc[0] for _, lanes in modules.groupby(runs)}
