"""Iteration time of every strategy on every job, relative to the fastest strategy of the job.

Cells of ``experiments/figure/iteration_time.yaml``; corresponds to Figure 11 of arXiv:2605.27918. Left: geometric mean
over the jobs of which a strategy has a result, with its 95% CI over seeds. Right: every job; a star marks missing
seeds. The CSV has seconds, intervals and, if posterior runs are there (``entrain-bench figures posterior``),
P(fastest).
"""

import pandas as pd

from entrain_bench.answers import tables
from entrain_bench.answers.labels import FAMILIES, OURS, families, model_size, names
from entrain_bench.answers.posterior import chances_by_job, with_chances
from entrain_bench.answers.sentences import posterior_sentences
from entrain_bench.figures._forms import handles, ranking
from entrain_bench.figures._style import FAMILY_COLOURS, Picture, legend_above

EXPERIMENT = "iteration_time"
RUNS = True
# ``draw`` also takes the posterior runs of its jobs.
DRAWS = True
# Cells without a result, by the state of the runs.
WORDS = {"failed": "fails", "skipped": "-", tables.MISSING: ""}
load = tables.run_table


def draw(data: pd.DataFrame, drawn: pd.DataFrame | None = None) -> Picture:
    """A row a strategy, a column a job; ``drawn`` are the runs under posterior draws."""
    # Columns of runs without a result are absent.
    data = data.reindex(columns=data.columns.union(tables.TIMES, sort=False))
    labels, traces, models = (names(data, column) for column in ("strategy", "workload", "model"))
    jobs = data[[*tables.JOB, "cluster"]].drop_duplicates(tables.JOB)
    table = tables.summarise(data).merge(jobs, on=tables.JOB)
    overall = tables.time_over_fastest(data)
    jobs = jobs.sort_values("model", key=lambda column: column.map(model_size), kind="stable")
    columns = pd.MultiIndex.from_arrays([jobs["model"].map(models), jobs["workload"].map(traces)])
    relative = table["behind"].where(table["verdict"] != "fastest", 1.0).astype(float)
    # A star takes the place of a digit: cells have room for four letters.
    texts = relative.map("{:.2f}".format).mask(table["num_ok"] < table["num_runs"], relative.map("{:.1f}*".format))
    texts = texts.where(relative.notna(), table["status"].map(WORDS))
    shown = table.assign(relative=relative, text=texts).pivot(index="strategy", columns=tables.JOB)
    cases, cells = (
        pd.DataFrame(shown[name])[[*jobs[tables.JOB].itertuples(index=False, name=None)]].set_axis(
            columns, axis="columns"
        )
        for name in ("relative", "text")
    )
    fewer = overall["num_jobs"][overall["num_jobs"] < len(jobs)].map(" ({} jobs)".format)
    kinds = families(data)
    colours = {name: FAMILY_COLOURS[kind] for name, kind in kinds.items()}
    of = "" if len(jobs) == 1 else ",\ngeometric mean"
    named = {name: f"{label}{fewer.get(name, '')}" for name, label in labels.items()}
    figure = ranking(overall, cases, cells, named, colours, f"time / fastest{of}")
    present = {kind: colour for kind, colour in FAMILY_COLOURS.items() if kind in kinds.values()}
    legend_above(figure, handles(present, FAMILIES, line="", marker="o"))
    odds = chances_by_job(drawn) if drawn is not None else {}
    table = with_chances(table, odds) if odds else table
    ours = [name for name, family in kinds.items() if family == OURS]
    said = [tables.winners(data, overall[overall["num_jobs"] == len(jobs)], labels) + tables.lacking(table, labels)]
    return Picture(figure, table, " ".join([*said, *posterior_sentences([*odds.values()], labels, ours)]))
