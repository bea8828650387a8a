"""Iteration time of every strategy on every job, relative to the fastest strategy of the job.

Cells of ``experiments/figure/iteration_time.yaml``; corresponds to Figure 11 of arXiv:2605.27918. Dots are geometric
means over all jobs with 95% intervals over seeds; a star marks strategies without a result at some seeds. The CSV has
seconds, intervals and, if posterior runs are there (``entrain-bench figures posterior``), P(fastest).
"""

from typing import Any

import pandas as pd
from matplotlib.colors import LogNorm

from entrain_bench.answers import tables
from entrain_bench.answers.labels import OURS, families, names
from entrain_bench.answers.posterior import chances_by_job
from entrain_bench.answers.sentences import posterior_sentences
from entrain_bench.figures._style import DARKEST, Picture, by_job, family_colours, family_handles, ranking

EXPERIMENT = "iteration_time"
RUNS = True
# ``draw`` also takes the posterior runs of its jobs.
DRAWS = True
load = tables.run_table


def draw(data: pd.DataFrame, drawn: pd.DataFrame | None = None) -> Picture:
    """A row a strategy, a column a job; ``drawn`` are the runs under posterior draws."""
    # Columns of runs without a result are absent.
    data = data.reindex(columns=data.columns.union(tables.TIMES, sort=False))
    labels = names(data, "strategy")
    table = tables.summarise(tables.with_all(data))
    jobs = table[table["workload"] != tables.ALL]
    relative = jobs["behind"].where(jobs["verdict"] != "fastest", 1.0)
    wide, shown = by_job(data, jobs.assign(relative=relative), "relative")
    overall = tables.time_over_fastest(data)
    look: dict[str, Any] = {"label": "time / fastest", "norm": LogNorm(1, DARKEST), "start": 1.0}
    figure = ranking(overall, wide, shown, family_colours(data), family_handles(data), **look)
    odds = chances_by_job(drawn) if drawn is not None else {}
    chances = [odds.get((row["model"], row["workload"]), {}).get(row["strategy"]) for _, row in table.iterrows()]
    if odds:
        leads = [chance.lead if chance else None for chance in chances]
        table["p_fastest"] = [chance.probability if chance else None for chance in chances]
        table["lead_low"] = [lead.low if lead else None for lead in leads]
        table["lead_high"] = [lead.high if lead else None for lead in leads]
    ours = [name for name, family in families(data).items() if family == OURS]
    posterior = posterior_sentences([*odds.values()], labels, ours)
    return Picture(
        figure, table, " ".join([_message(data, overall, labels) + tables.lacking(jobs, labels), *posterior])
    )


def _message(data: pd.DataFrame, overall: pd.DataFrame, labels: dict[str, str]) -> str:
    winners = [next(iter(comparison.best), "") for comparison in tables.compared(data, tables.JOB).values()]
    often = sorted({*winners} - {""}, key=lambda name: -winners.count(name))
    said = ", ".join(f"{labels[name]} in {winners.count(name)}" for name in often) or "none is decided"
    first = f"Fastest of {len(winners)} job{'s' if len(winners) > 1 else ''}: {said}."
    if len(overall) < 2:
        return first
    second = overall.iloc[1]
    return f"{first} Over all jobs, {labels[str(second.name)]} is the runner-up with {second['mean']:.2f}x the time."
