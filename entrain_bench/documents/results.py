"""Iteration times of all strategies as text: ``results.md``."""

from __future__ import annotations

import pandas as pd

from entrain_bench.documents.markdown import markdown_table
from entrain_bench.files import write_atomically
from entrain_bench.records.labels import names
from entrain_bench.records.tables import mean_over_seeds, run_table
from entrain_bench.study import Output, Study

CASE = ["model", "workload", "strategy"]
# Title and sweep of every table.
TABLES = {
    "Default setting: layout.tp=2 layout.dp=4": "iteration_time",
    "Free degrees: layout.tp=null layout.dp=null": "free_degrees",
    "Free degrees and microbatch size, 8 trials: microbatch_size=null strategy.planner.num_trials=8": (
        "free_degrees_trials"
    ),
}
INTRODUCTION = """# Results

Generated from the runs of the figures: seconds an iteration, mean over seeds; in brackets the gap to the lower bound of
the layout that the strategy chose ([metrics.md](../docs/metrics.md)), so gaps compare schedules and times compare
strategies. The best time of a row is bold. 64 simulated A40, global batch 512, microbatches of 4; every sweep is a YAML
in `experiments/figure/`. Planners choose as their papers describe in the first two tables; in the third all run their
best candidates on trial and choose the microbatch size, too (DFLOP's number of microbatches is its own in all three).
"""


def results_output() -> Output:
    """The document."""
    return Output(
        "results", [(f"figure={experiment}",) for experiment in TABLES.values()], write_results, ["results.md"]
    )


def write_results(study: Study) -> str:
    """Write ``results.md``; returns what is missing from it, if anything."""
    text, problem = results_document(study)
    write_atomically(study.results.root / "results.md", text.encode())
    return problem


def results_document(study: Study) -> tuple[str, str]:
    """The text of the document, and what is missing from it."""
    parts, problems = [INTRODUCTION], []
    for title, experiment in TABLES.items():
        problems.append(study.problem(f"figure={experiment}"))
        table = run_table(study.cells(f"figure={experiment}"), study.results)
        seeds = table["seed"].nunique()
        parts.append(f"## {title}\n\n`figure={experiment}`, {seeds} seed{'s' if seeds > 1 else ''}.\n")
        parts.append(results_markdown(table))
    return "\n".join(parts), "; ".join(filter(None, problems))


def results_markdown(data: pd.DataFrame) -> str:
    """A row a model and workload, a column a strategy; runs without result show their status."""
    labels = {column: names(data, column) for column in CASE}
    times = mean_over_seeds(data, CASE, "iteration_time_s")
    gaps = mean_over_seeds(data, CASE, "gap_to_lower_bound").set_index(CASE)["gap_to_lower_bound"]
    best = times.groupby(CASE[:2])["iteration_time_s"].transform("min")
    cells = {}
    for row, least in zip(times.to_dict("records"), best, strict=True):
        case = tuple(row[name] for name in CASE)
        seconds = f"{row['iteration_time_s']:.3f}"
        emphasis = "**" if row["iteration_time_s"] == least else ""
        shown = f"{emphasis}{seconds}{emphasis} ({100 * gaps[case]:.0f}%)"
        cells[case] = shown if row["num_ok"] == row["num_runs"] else str(row["status"])
    rows = [
        [f"{labels['model'][model]} {labels['workload'][workload]}"]
        + [cells.get((model, workload, strategy), "") for strategy in labels["strategy"]]
        for model in labels["model"]
        for workload in labels["workload"]
    ]
    heading = ["model, workload", *labels["strategy"].values()]
    return markdown_table(heading, rows, right=heading[1:])
