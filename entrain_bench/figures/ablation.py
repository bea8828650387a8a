"""Speedup of each part of a system: planners, assigners and schedulers of several systems in every combination.

No figure of a paper; arXiv:2605.27918 and the others ablate their own parts only. Cells of
``experiments/figure/ablation.yaml``: parts by the names of their YAMLs. A panel a scheduler and trace, a row a planner,
a column an assigner; the number is the speedup over the first of each together, seed by seed, with a question mark
where its 95% interval includes 1. White combinations do not fit together, as the parts themselves say.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from entrain_bench.answers.labels import names
from entrain_bench.answers.tables import JOB, gain_text, run_table, speedup_table
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, Picture, heatmap_of, panels, speedup_shades
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results

EXPERIMENT = "ablation"
RUNS = True
PARTS = ["planner", "assigner", "scheduler"]
CASE = [*JOB, *PARTS]
# Parts that do not fit together leave their cell white.
WORDS = {"skipped": ""}
# Speedups at which colours end; further ones look alike.
EXTREME = 1.5


def load(cells: Sequence[Cell], results: Results) -> pd.DataFrame:
    """The runs; ``planner``, ``assigner`` and ``scheduler`` are the choices of the sweep."""
    chosen = [dict(text.partition("=")[::2] for text in cell.overrides) for cell in cells]
    # One strategy whose parts are exchanged: its rows keep the order of the cells.
    parts = {part: [choice[f"strategy/{part}"] for choice in chosen] for part in PARTS}
    return run_table(cells, results).assign(**parts)


def draw(data: pd.DataFrame) -> Picture:
    """Schedulers from top to bottom, models and traces side by side."""
    table = gains(data)
    traces = names(data, "workload")
    models = names(data, "model")
    jobs = [(model, trace) for model in models for trace in traces]
    planners, assigners, schedulers = ({name: str(name) for name in data[part].unique()} for part in PARTS)
    height_in = 0.75 + (0.25 + 0.15 * len(planners)) * len(schedulers)
    figure, axes = panels(len(schedulers), len(jobs), DOUBLE_COLUMN_IN, height_in, sharex=True, sharey=True)
    shown = table.assign(text=[gain_text(row, WORDS) for row in table.to_dict("records")])
    shown = shown.set_index(["scheduler", *JOB, "planner", "assigner"]).sort_index()
    places = [(scheduler, job) for scheduler in schedulers for job in jobs]
    for panel, (scheduler, (model, trace)) in zip(axes, places, strict=True):
        one = pd.DataFrame(shown.xs((scheduler, model, trace)))
        heatmap_of(panel, one, planners, assigners, "speedup", **speedup_shades(EXTREME))
        if panel in axes[: len(jobs)]:
            panel.set_title(f"{models[model]}, {traces[trace]}" if len(models) > 1 else traces[trace])
        if (model, trace) == jobs[0]:
            panel.set_ylabel(f"scheduler\n{scheduler}")
    figure.supylabel("planner")
    figure.supxlabel("assigner")
    return Picture(figure, table, _message(table))


def gains(data: pd.DataFrame) -> pd.DataFrame:
    """Mean iteration times with ``speedup`` over the first of each part together."""
    base = (data[PARTS] == data[PARTS].iloc[0]).all(axis="columns")
    return speedup_table(data, data[base], CASE, JOB)


def _message(table: pd.DataFrame) -> str:
    """The parts with the greatest speedup over all jobs."""
    logs = np.log(table.assign(speedup=table["speedup"].astype(float)).set_index(PARTS)["speedup"]).groupby(level=PARTS)
    means = logs.mean()[logs.count() == table[JOB].drop_duplicates().shape[0]]
    if means.empty:
        return "No combination has a result on every job."
    parts = ", ".join(f"{part} {name}" for part, name in zip(PARTS, means.idxmax(), strict=True))
    return f"Fastest combination: {parts}; {np.exp(means.max()):.2f}x, geometric mean over all jobs."
