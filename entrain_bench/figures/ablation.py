"""Speedup of each part of a system: planners, assigners and schedulers of several systems in every combination.

No figure of a paper; arXiv:2605.27918 and the others ablate their own parts only. Cells of
``experiments/figure/ablation.yaml``: parts by the names of their YAMLs. A panel a scheduler and trace, a row a planner,
a column an assigner; the number is the speed-up over the first of each together, seed by seed, in italics where its
95% interval includes 1. Hatched combinations do not fit together, as the parts themselves say.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from entrain_bench.answers.labels import names
from entrain_bench.answers.tables import interval_over_seeds, run_table
from entrain_bench.figures._bars import speedup_over
from entrain_bench.figures._style import FAINT, INK, facets, is_dark, legend_above, say, show_grid
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results

EXPERIMENT = "ablation"
RUNS = True
PARTS = ["planner", "assigner", "scheduler"]
JOB = ["model", "workload"]
CASE = [*JOB, *PARTS]
# Height of a row of a panel, and of what is above and below its rows.
ROW_IN = 0.17
PANEL_IN = 0.3
HEAD_IN = 0.75
# Speed-ups at which colours end; further ones look alike.
EXTREME = 1.5


def load(cells: Sequence[Cell], results: Results) -> pd.DataFrame:
    """The runs; ``planner``, ``assigner`` and ``scheduler`` are the choices of the sweep."""
    chosen = [dict(text.partition("=")[::2] for text in cell.overrides) for cell in cells]
    # One strategy whose parts are exchanged: its rows keep the order of the cells.
    return run_table(cells, results).assign(**{part: [own[f"strategy/{part}"] for own in chosen] for part in PARTS})


def draw(data: pd.DataFrame) -> tuple[Figure, pd.DataFrame]:
    """Schedulers from top to bottom, models and traces side by side."""
    table = gains(data)
    traces = names(data, "workload")
    models = names(data, "model")
    jobs = [(model, trace) for model in models for trace in traces]
    planners, assigners, schedulers = ([*map(str, data[part].unique())] for part in PARTS)
    height_in = HEAD_IN + (PANEL_IN + ROW_IN * len(planners)) * len(schedulers)
    figure, axes = facets(schedulers, jobs, height_in, sharex=True, sharey=True)
    colours = ScalarMappable(LogNorm(1 / EXTREME, EXTREME), sns.color_palette("vlag_r", as_cmap=True))
    for scheduler, (model, trace), panel in axes:
        one = (table["model"] == model) & (table["workload"] == trace) & (table["scheduler"] == scheduler)
        rows = {(row["planner"], row["assigner"]): row for row in table[one].to_dict("records")}
        _draw_panel(panel, rows, planners, assigners, colours)
        if scheduler == schedulers[0]:
            panel.set_title(f"{models[model]}, {traces[trace]}" if len(models) > 1 else traces[trace])
        if (model, trace) == jobs[-1]:
            panel.yaxis.set_label_position("right")
            panel.set_ylabel(f"scheduler\n{scheduler}", rotation=270, va="bottom")
    figure.supylabel("planner", fontsize="medium")
    figure.supxlabel("assigner", fontsize="medium")
    unfit = Patch(facecolor="white", edgecolor="#b0b0b0", hatch="////", label="parts do not fit together")
    number = Patch(facecolor="none", label="number: speedup over the first of each; italics: interval includes 1")
    legend_above(figure, [*([unfit] if table["speedup"].isna().any() else []), number])
    say(figure, _message(table))
    return figure, table


def gains(data: pd.DataFrame) -> pd.DataFrame:
    """Mean iteration times (``interval_over_seeds``), with ``speedup`` over the first of each part together."""
    table = interval_over_seeds(data, CASE, "iteration_time_s")
    base = (data[PARTS] == data[PARTS].iloc[0]).all(axis="columns")
    return table.join(speedup_over(data[base], data, CASE, JOB), on=CASE)


def _message(table: pd.DataFrame) -> str:
    """The parts with the greatest speedup over all jobs."""
    logs = np.log(table.assign(speedup=table["speedup"].astype(float)).set_index(PARTS)["speedup"]).groupby(level=PARTS)
    means = logs.mean()[logs.count() == table[JOB].drop_duplicates().shape[0]]
    if means.empty:
        return "No combination has a result on every job."
    parts = ", ".join(f"{part} {name}" for part, name in zip(PARTS, means.idxmax(), strict=True))
    return f"Fastest combination: {parts}; {np.exp(means.max()):.2f}x, geometric mean over all jobs."


def _draw_panel(
    panel: Axes,
    rows: Mapping[tuple[str, str], Mapping[Hashable, Any]],
    planners: Sequence[str],
    assigners: Sequence[str],
    colours: ScalarMappable,
) -> None:
    for y, planner in enumerate(planners):
        for x, assigner in enumerate(assigners):
            row = rows.get((planner, assigner), {"num_ok": 0, "num_runs": 0, "status": "missing", "speedup": None})
            corner = (x - 0.5, y - 0.5)
            if pd.isna(row["speedup"]):
                fits = row["status"] != "skipped"
                style: dict[str, Any] = {"facecolor": "white", "edgecolor": "#b0b0b0", "linewidth": 0.4}
                panel.add_patch(Rectangle(corner, 1, 1, **style, hatch=None if fits else "////"))
                if fits:
                    panel.text(x, y, str(row["status"]), ha="center", va="center", color=FAINT)
                continue
            colour = tuple(colours.to_rgba(np.array([row["speedup"]]))[0])
            panel.add_patch(Rectangle(corner, 1, 1, facecolor=colour, edgecolor="white", linewidth=0.8))
            clear = row["num_ok"] > 1 and not row["speedup_low"] < 1 < row["speedup_high"]
            lacking = "*" if row["num_ok"] < row["num_runs"] else ""
            text = f"{row['speedup']:.2f}{lacking}"
            ink = "white" if is_dark(colour) else INK
            panel.text(x, y, text, ha="center", va="center", color=ink, style="normal" if clear else "italic")
    show_grid(panel, assigners, planners, rotation=90)
