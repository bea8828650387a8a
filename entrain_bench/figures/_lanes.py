"""Passes of a pipeline's ranks over time: panels of schedules, the replica that each shows, its lanes and bars."""

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
from entrain_bench.figures import _style as style
from entrain_bench.specs.module_layers import Role

# Heights: of a lane, of a replica of few lanes, of a title, of all around the panels.
LANE_IN = 0.16
REPLICA_IN = 0.28
TITLE_IN = 0.17
AROUND_IN = 0.9
# Shorter iterations have an axis in milliseconds.
SHORT_S = 0.1
# Bars of groups have their degrees in them where a letter has this part of a panel.
LETTER = 0.01
SMALLEST_PT = 5.0
STEP = "Gradient sync and optimizer"
STEP_COLOUR: style.Colour = (0.6, 0.6, 0.6)
PASSES = {"forward": "forward", "backward": "backward", "weight": "weights"}
MICROBATCH = ["replica", "module", "microbatch"]
PASS = ["module", "stage", "replica", "microbatch", "part", "pass"]


def gantt(
    bars: Mapping[str, pd.DataFrame],
    labels: Mapping[str, str],
    reasons: Mapping[str, str],
    axes_of: Mapping[str, str],
    lane_in: float = LANE_IN,
) -> Figure:
    """A panel a schedule (``slowest_replica``), from top to bottom, by the order of ``labels``.

    Where a panel has no bars it has its reason; ``axes_of`` names the schedule whose time a panel has as its axis.
    """
    colours = colours_of(pd.concat(bars.values()))
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
        draw_lanes(panel, bars[name], colours, 1.01 * end_s)
        panel.set_title(f"{scale * ends_s[name]:.4g} {unit}", loc="right")
        panel.xaxis.set_major_formatter(FuncFormatter(lambda time_s, _, scale=scale: f"{scale * time_s:g}"))
        if after == axes_of[name]:
            panel.tick_params(labelbottom=False)
        else:
            panel.set_xlabel(f"Time ({unit})")
    style.legend_above(figure, [Patch(facecolor=colour, label=kind) for kind, colour in colours.items()], columns=4)
    return figure


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


def colours_of(actions: pd.DataFrame) -> dict[str, style.Colour]:
    """A hue for each module, and one for deferred parts: light is forward, full backward, dark weights, grey steps."""
    modules = [spell(name) for name in actions.sort_values("side")["module"].unique()]
    hues = style.palette([*modules, "deferred"])
    colours = {}
    for module in modules:
        for suffix, hue in (("", hues[module]), (", deferred", hues["deferred"])):
            colours[f"{module} forward{suffix}"] = style.lighter(hue)
            colours[f"{module} backward{suffix}"] = hue
            colours[f"{module} weights{suffix}"] = style.darker(hue)
    colours[STEP] = STEP_COLOUR
    present = set(actions["kind"])
    return {kind: colour for kind, colour in colours.items() if kind in present}


def draw_lanes(panel: Axes, rows: pd.DataFrame, colours: dict[str, style.Colour], end_s: float) -> None:
    """A bar a pass and a row a lane, from 0 to ``end_s``."""
    top = rows["lane"]
    bottom = rows["lane"]
    if has_groups(rows):
        lane = rows.groupby(PASS)["lane"]
        top = lane.transform("min")
        bottom = lane.transform("max")
        _write_degrees(panel, rows, (top + bottom) / 2, end_s)
    start = rows["start_s"]
    end = rows["end_s"]
    corners = np.stack(
        [start, top - 0.44, end, top - 0.44, end, bottom + 0.44, start, bottom + 0.44], axis=1, dtype=np.float64
    )
    faces = [colours[kind] for kind in rows["kind"]]
    bars = PolyCollection(list(corners.reshape(-1, 4, 2)), facecolors=faces, edgecolors="white", linewidths=0.1)
    panel.add_collection(bars)
    labels = lane_names(rows)
    panel.set_yticks([*labels], [*labels.values()])
    panel.set(ylim=(rows["lane"].max() + 0.6, -0.6), xlim=(0, end_s))
    panel.tick_params(axis="y", length=0)


def _write_degrees(panel: Axes, rows: pd.DataFrame, middle: pd.Series, end_s: float) -> None:
    for row in rows.assign(middle=middle).drop_duplicates(PASS).to_dict("records"):
        text = degrees_of(row["group"])
        if row["end_s"] - row["start_s"] > LETTER * len(text) * end_s:
            look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": SMALLEST_PT, "clip_on": True}
            panel.text((row["start_s"] + row["end_s"]) / 2, row["middle"], text, **look)


def lane_names(rows: pd.DataFrame) -> dict[float, str]:
    """Labels by place: ranks of each lane if groups have several widths, else the modules of neighbouring lanes."""
    if has_groups(rows):
        ranks = rows.drop_duplicates("lane").sort_values("lane")[["lane", "rank", "num_ranks"]]
        return {
            lane: f"Rank {first}" if count == 1 else f"Ranks {first}-{first + count - 1}"
            for lane, first, count in ranks.itertuples(index=False)
        }
    held = rows[rows["replica"] >= 0].sort_values(["side", "module"]).groupby("lane")["module"]
    modules = held.agg(lambda names: " + ".join(spell(str(name)) for name in names.unique()))
    runs = modules.ne(modules.shift()).cumsum()
    return {float(lanes.index.to_numpy().mean()): lanes.iloc[0] for _, lanes in modules.groupby(runs)}


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
    """The actions of the lanes that hold an LLM replica and of the encoder stages that feed it.

    Encoders on lanes of their own with another DP feed the LLM's replicas in order. Lanes with encoder work come first.
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
