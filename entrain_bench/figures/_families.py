"""Many strategies in little room: a bar for the fastest of every family, a mark for each of the others."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from entrain_bench.answers.labels import FAMILIES, families
from entrain_bench.figures._bars import FILLED, Grid, mark_gap
from entrain_bench.figures._style import INK

# Of a family's place on the x axis, the share of its bar; marks of the others share the rest.
BAR_SHARE = 0.5
# Marks that stand beside each other before the next is above the first again.
MARK_COLUMNS = 3


@dataclass(frozen=True, slots=True)
class Group:
    """Strategies by display order that share a place on the x axis: a family, or the baseline without a name."""

    name: str
    strategies: tuple[str, ...]


def groups_of(data: pd.DataFrame) -> list[Group]:
    """The first strategy as the baseline, then every family with its other members."""
    (baseline, _), *others = families(data).items()
    members = {family: tuple(name for name, theirs in others if theirs == family) for family in FAMILIES}
    return [Group("", (baseline,)), *(Group(FAMILIES[family], names) for family, names in members.items() if names)]


def draw_groups(
    panel: Axes,
    cases: Mapping[tuple[str, str], Mapping[Hashable, Any]],
    grid: Grid,
    groups: Sequence[Group],
    draw_bar: Callable[[Axes, Mapping[Hashable, Any], float, float], None],
) -> None:
    """One panel: for every model a place for each group.

    ``cases`` are rows of ``interval_over_seeds`` of the iteration time by model and strategy; ``draw_bar`` draws one at
    a position with a width.
    """
    width = FILLED / len(groups)
    for place, model in enumerate(grid.models):
        for step, group in enumerate(groups):
            left = place - FILLED / 2 + step * width
            rows = [cases[model, name] for name in group.strategies if (model, name) in cases]
            ran = sorted((row for row in rows if row["num_ok"]), key=_place)
            bar = BAR_SHARE * width
            if not ran:
                mark_gap(panel, left + bar / 2, bar, rows[0]["status"] if rows else "no cell")
                continue
            draw_bar(panel, ran[0], left + bar / 2, bar)
            for index, row in enumerate(ran[1:]):
                column = (index % MARK_COLUMNS + 1) / (MARK_COLUMNS + 1)
                colour = grid.colours[str(row["strategy"])]
                position = left + bar + column * (width - bar)
                style: dict[str, Any] = {"markersize": 2.4, "color": colour, "mec": INK, "mew": 0.25}
                panel.plot(position, row["iteration_time_s"], "o", **style, zorder=3)


def other_handle() -> Artist:
    """What marks are."""
    style: dict[str, Any] = {"color": "white", "marker": "o", "linestyle": "", "markersize": 2.4}
    return Line2D([], [], **style, mec=INK, mew=0.5, label="others of the family")


def _place(row: Mapping[Hashable, Any]) -> tuple[bool, float]:
    """The fastest first; those that fail at some seeds come after all others."""
    return row["num_ok"] < row["num_runs"], row["iteration_time_s"]
