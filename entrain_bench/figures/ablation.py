"""Speedup of each part of a system: planners, assigners and schedulers of several systems in every combination.

No figure of a paper; arXiv:2605.27918 and the others ablate their own parts only. Cells of
``experiments/figure/ablation.yaml``: parts by the names of their YAMLs. A panel a scheduler and trace, a row a planner,
a column an assigner; the number is the speedup over the first of each together, seed by seed, with a question mark
where its 95% interval includes 1. White combinations do not fit together, as the parts themselves say.
"""

from collections.abc import Sequence

import pandas as pd

from entrain_bench.answers.comparison import geometric_mean
from entrain_bench.answers.labels import names
from entrain_bench.answers.tables import JOB, gain_text, run_table, speedup_table
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, Picture, heatmap_of, panels, speedup_shades
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results

EXPERIMENT = "ablation"
RUNS = True
PARTS = ["planner", "assigner", "scheduler"]
# Parts that do not fit together leave their cell white.
WORDS = {"skipped": ""}
# Speedups at which colours end; further ones look alike.
EXTREME = 1.5


def load(cells: Sequence[Cell], results: Results) -> pd.DataFrame:
    """The runs; ``planner``, ``assigner`` and ``scheduler`` are the choices of the sweep."""
    # One strategy whose parts are exchanged: its rows keep the order of the cells.
    chosen = [dict(text.partition("=")[::2] for text in cell.overrides) for cell in cells]
    return run_table(cells, results).assign(**{part: [one[f"strategy/{part}"] for one in chosen] for part in PARTS})


def draw(data: pd.DataFrame) -> Picture:
    """Schedulers from top to bottom, models and traces side by side."""
    table = gains(data)
    traces = names(data, "workload")
    models = names(data, "model")
    planners, assigners, schedulers = ({name: str(name) for name in data[part].unique()} for part in PARTS)
    jobs = [(model, trace) for model in models for trace in traces]
    height_in = 0.75 + (0.25 + 0.15 * len(planners)) * len(schedulers)
    figure, axes = panels(len(schedulers), len(jobs), DOUBLE_COLUMN_IN, height_in, sharex=True, sharey=True)
    shown = table.assign(text=[gain_text(row, WORDS) for row in table.to_dict("records")])
    shown = shown.set_index(["scheduler", *JOB, "planner", "assigner"]).sort_index()
    for panel, case in zip(axes, [(scheduler, *job) for scheduler in schedulers for job in jobs], strict=True):
        one = pd.DataFrame(shown.xs(case))
        heatmap_of(panel, one, planners, assigners, "speedup", **speedup_shades(EXTREME))
    for panel, (model, trace) in zip(axes, jobs, strict=False):
        panel.set_title(f"{models[model]}, {traces[trace]}" if len(models) > 1 else traces[trace])
    for panel, scheduler in zip(axes[:: len(jobs)], schedulers, strict=True):
        panel.set_ylabel(f"scheduler\n{scheduler}")
    figure.supylabel("planner")
    figure.supxlabel("assigner")
    by_job = table.astype({"speedup": float}).pivot(index=PARTS, columns=JOB, values="speedup").dropna()
    means = by_job.apply(lambda row: geometric_mean(row.tolist()), axis="columns")
    if means.empty:
        return Picture(figure, table, "No combination has a result on every job.")
    best: tuple[str, ...] = means.index.to_list()[int(means.argmax())]
    parts = ", ".join(f"{part} {name}" for part, name in zip(PARTS, best, strict=True))
    message = f"Fastest combination: {parts}; {means.max():.2f}x, geometric mean over all jobs."
    return Picture(figure, table, message)


def gains(data: pd.DataFrame) -> pd.DataFrame:
    """Mean iteration times with ``speedup`` over the first of each part together."""
    base = (data[PARTS] == data[PARTS].iloc[0]).all(axis="columns")
    return speedup_table(data, data[base], [*JOB, *PARTS], JOB)
