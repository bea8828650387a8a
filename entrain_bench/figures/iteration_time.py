"""Iteration time of every strategy by trace and model, fastest first, with the time over the fastest's.

Cells of ``experiments/figure/iteration_time.yaml``; drawn as Figure 11 of arXiv:2605.27918, whose setting is that of
``entrain_setting``. Bars and first numbers are means over seeds, in seconds. The second number says by how many percent
a strategy is slower than the fastest, seed by seed, with half the width of its 95% interval. With several seeds,
strategies in bold are not significantly slower than the fastest. A strategy without a result at some seeds has a star
and is last. "All traces" has the geometric mean over the traces at each seed. The line below the panels lists the knobs
that are given and free. If posterior runs are there (``entrain-bench figures posterior``), the third number (P) is
P(fastest) over draws of the hardware constants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from entrain_bench.answers.comparison import Comparison, Verdict
from entrain_bench.answers.labels import OURS, families, names
from entrain_bench.answers.posterior import Chance, chances_by_job
from entrain_bench.answers.sentences import ONE_SEED, posterior_sentences
from entrain_bench.answers.tables import ALL, compared, interval_over_seeds, over_seeds, run_table
from entrain_bench.answers.text import count, listing
from entrain_bench.figures._bars import speedup_over
from entrain_bench.figures._ranked import (
    Row,
    change,
    counted,
    draw_ranked,
    family_colours,
    family_handles,
    make_room,
    number,
    ranked_legend,
    ranked_panels,
    starred,
    starred_handles,
)
from entrain_bench.figures._style import FONT_PT, say

EXPERIMENT = "iteration_time"
RUNS = True
# ``draw`` also takes the posterior runs of its jobs.
DRAWS = True
JOB = ["model", "workload"]
CASE = [*JOB, "strategy"]
TIMES = ["iteration_time_s", "lower_bound_s"]
HEADINGS = ("s", "% slower")
PROBABILITY = "P"
# What the line below the panels says is given or free, by its column.
KNOBS = {
    "TP": "layout.tp",
    "CP": "layout.cp",
    "PP": "layout.pp",
    "DP": "layout.dp",
    "microbatch size": "microbatch_size",
    "tuning": "tuning",
}
load = partial(run_table, settings=KNOBS)


def draw(data: pd.DataFrame, drawn: pd.DataFrame | None = None) -> tuple[Figure, pd.DataFrame]:
    """A panel a trace and model, and one a model for all traces; ``drawn`` are the runs under posterior draws."""
    labels = names(data, "strategy")
    traces = names(data, "workload")
    models = names(data, "model")
    odds = chances_by_job(drawn) if drawn is not None else {}
    headings = (*HEADINGS, PROBABILITY) if odds else HEADINGS
    runs = with_all(data)
    comparisons = compared(runs, JOB)
    table = summarise(runs)
    traces |= {ALL: "All traces"}
    figure, axes = ranked_panels(len(comparisons), len(labels))
    colours = family_colours(data)
    # A row a trace, a column a model.
    rank = {name: place for place, name in enumerate(dict.fromkeys([ALL, *traces]))}
    jobs = sorted(comparisons, key=lambda job: (rank[job[1]], [*models].index(job[0])))
    for panel, (model, trace) in zip(axes, jobs, strict=True):
        mine = table[(table["model"] == model) & (table["workload"] == trace)].set_index("strategy").to_dict("index")
        ranked = [name for name in comparisons[model, trace].ranked if name in mine]
        own = odds.get((model, trace), {})
        rows = [
            _row(labels[name], colours[name], mine[name], comparisons[model, trace], name, own.get(name))
            for name in ranked
        ]
        draw_ranked(panel, f"{traces[trace]}, {models[model]}", headings if own else HEADINGS, rows)
    notes = {
        "bold: not significantly slower than the fastest": any(map(is_tested, comparisons.values())),
        f"{PROBABILITY}: P(fastest) over posterior draws": bool(odds),
    }
    said = [Line2D([], [], linestyle="", label=label) for label, needed in notes.items() if needed]
    ranked_legend(figure, [*family_handles(data), *said, *starred_handles(table)])
    ours = [name for name, family in families(data).items() if family == OURS]
    text = " ".join([message(comparisons, labels, models), *posterior_sentences([*odds.values()], labels, ours)])
    say(figure, text, FONT_PT)
    make_room(figure)
    figure.supxlabel(f"Iteration time (s); {setting_of(data)}".removesuffix("; "), fontsize="medium")
    probabilities = [odds.get((m, t), {}).get(s) for m, t, s in zip(*(table[name] for name in CASE), strict=True)]
    return figure, table.join(_columns(probabilities)) if odds else table


def _columns(found: Sequence[Chance | None]) -> pd.DataFrame:
    """P(fastest) and the 90% interval of the lead, as columns; empty where there is none."""
    leads = [each.lead if each else None for each in found]
    columns = {
        "p_fastest": [each.probability if each else None for each in found],
        "lead_low": [each.low if each else None for each in leads],
        "lead_high": [each.high if each else None for each in leads],
    }
    return pd.DataFrame(columns, dtype=float)


def message(
    comparisons: Mapping[tuple[str, ...], Comparison[str]], labels: Mapping[str, str], models: Mapping[str, str]
) -> str:
    """Return how often which strategy is the fastest, its lead over all traces, and how far the baseline is behind."""
    jobs = {job: each for job, each in comparisons.items() if job[1] != ALL}
    winners = [next(iter(each.best), "not decided") for each in jobs.values()]
    leads = []
    for (model, trace), each in comparisons.items():
        second = next((name for name in each.ranked[1:] if each.standings[name].behind), None)
        if trace == ALL and each.best and second and is_tested(each):
            pair = f"{labels[each.best[0]]} leads {labels[second]} by"
            lead = f"{pair} {change(each.standings[second].behind).strip('+')}"
            if len(each.best) > 1:
                lead = f"no significant difference between {listing([labels[name] for name in each.best])}"
            leads.append(f" All traces, {models[model]}: {lead}.")
    if not any(map(is_tested, comparisons.values())):
        leads.append(f" {ONE_SEED}")
    first = next(iter(labels))
    behind = [each.standings[first].behind for each in jobs.values() if first in each.standings]
    ratios = [interval.mean for interval in behind if interval]
    taken = f" {labels[first]} takes {min(ratios):.2f}x to {max(ratios):.2f}x the fastest's time." if ratios else ""
    return f"Fastest strategy of {count(len(jobs), 'job')}: {counted(winners, labels)}.{''.join(leads)}{taken}"


def is_tested(comparison: Comparison[str]) -> bool:
    """Return whether a strategy ran at several seeds, so that differences can be significant."""
    return any(each.behind and each.behind.num_values > 1 for each in comparison.standings.values())


def setting_of(data: pd.DataFrame) -> str:
    """The knobs that all runs share with their value, then those that are free; empty without columns of knobs."""
    given = list[str]()
    free = list[str]()
    for knob in filter(data.columns.__contains__, KNOBS):
        values = data[knob].unique()
        if pd.isna(values).all():
            free.append(knob)
        elif len(values) == 1:
            given.append(f"{knob} {values[0]}")
    return "; ".join(filter(None, [", ".join(given), f"free: {', '.join(free)}" if free else ""]))


def with_all(data: pd.DataFrame) -> pd.DataFrame:
    """The runs, and the geometric mean over all traces of each strategy, model and seed as a trace ``ALL``.

    It has the first state of a run without result, if there is any.
    """
    if data["workload"].nunique() < 2:
        return data
    rows = []
    for _, runs in data.groupby(["model", "strategy", "seed"], sort=False):
        bad = runs[runs["status"] != "ok"]
        row = (runs if bad.empty else bad).iloc[0].to_dict() | {"workload": ALL}
        means = np.exp(np.log(runs[TIMES].astype(float)).mean()) if bad.empty else pd.Series(dtype=float)
        rows.append(row | {name: means.get(name) for name in TIMES})
    return pd.concat([data, pd.DataFrame(rows)], ignore_index=True)


def summarise(data: pd.DataFrame) -> pd.DataFrame:
    """Means, intervals and failures by model, workload and strategy.

    Returns:
        ``speedup`` over the first strategy with its ends; ``behind``, the time over the fastest's, with its ends, empty
        for the fastest; ``verdict`` of ``comparison``.
    """
    table = interval_over_seeds(data, CASE, "iteration_time_s")
    bounds = over_seeds(data, CASE, lower_bound_s=("lower_bound_s", "mean"))
    table = table.merge(bounds[[*CASE, "lower_bound_s"]], on=CASE)
    first = data[data["strategy"] == table["strategy"].iloc[0]]
    table = table.join(speedup_over(first, data, CASE, JOB), on=CASE)
    standings = [(job, name, each) for job, one in compared(data, JOB).items() for name, each in one.standings.items()]
    rows = [
        (*job, name, *((own.mean, own.low, own.high) if (own := each.behind) else (None,) * 3), each.verdict)
        for job, name, each in standings
    ]
    columns = [*CASE, "behind", "behind_low", "behind_high", "verdict"]
    return table.merge(pd.DataFrame(rows, columns=columns), on=CASE, how="left")


def _row(
    label: str, colour: Any, row: Mapping[Any, Any], comparison: Comparison[str], name: str, chance: Chance | None
) -> Row:
    if not row["num_ok"]:
        return Row(label, colour, None, [row["status"]])
    standing = comparison.standings[name]
    over = "fastest" if standing.verdict == Verdict.FASTEST else change(standing.behind).removesuffix("%")
    return Row(
        starred(label, row),
        colour,
        row["iteration_time_s"],
        [number(row["iteration_time_s"]), over, f"{chance.probability:.2f}" if chance else ""],
        bold=standing.verdict in (Verdict.FASTEST, Verdict.AS_GOOD) and is_tested(comparison),
    )
