"""Tables and sentences that several figures share: times over the fastest's, speedups, and what has no result."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from entrain_bench.answers.labels import names
from entrain_bench.answers.statistics import Interval, mean_interval
from entrain_bench.answers.tables import ALL, compared, interval_over_seeds, over_seeds, relative_over_seeds, run_table
from entrain_bench.answers.text import count, listing
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results

JOB = ["model", "workload"]
CASE = [*JOB, "strategy"]
TIMES = ["iteration_time_s", "lower_bound_s"]


def run_tables(cells: Mapping[str, Sequence[Cell]], results: Results) -> pd.DataFrame:
    """The runs of all rows of a figure's YAML, by the column ``row``."""
    tables = [run_table(mine, results).assign(row=label) for label, mine in cells.items()]
    return pd.concat(tables, ignore_index=True)


def speedup_over(reference: pd.DataFrame, data: pd.DataFrame, keys: Sequence[str], on: Sequence[str]) -> pd.DataFrame:
    """``speedup`` with its ends over reference runs that share keys (``relative_over_seeds``), by the keys."""
    slower = relative_over_seeds(data, reference, keys, on)
    # A ratio's ends are those of its inverse the other way round.
    ends = {"speedup": "relative", "speedup_low": "relative_high", "speedup_high": "relative_low"}
    return pd.DataFrame({name: 1 / slower[end] for name, end in ends.items()})


def speedup_table(data: pd.DataFrame, reference: pd.DataFrame, keys: Sequence[str], on: Sequence[str]) -> pd.DataFrame:
    """Mean iteration times (``interval_over_seeds``), with ``speedup`` over reference runs (``speedup_over``)."""
    table = interval_over_seeds(data, keys, "iteration_time_s")
    return table.join(speedup_over(reference, data, keys, on), on=[*keys])


def gain_text(row: Mapping[Hashable, Any], states: Mapping[str, str]) -> str:
    """A speedup, with a star if seeds are missing and a question mark if it may be 1; else the word for the state."""
    if pd.isna(row["speedup"]):
        return states.get(str(row["status"]), str(row["status"]))
    clear = row["num_ok"] > 1 and not row["speedup_low"] < 1 < row["speedup_high"]
    return f"{row['speedup']:.2f}{'*' if row['num_ok'] < row['num_runs'] else ''}{'' if clear else '?'}"


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
    rows = []
    for job, comparison in compared(data, JOB).items():
        for name, standing in comparison.standings.items():
            behind = standing.behind
            ends = (behind.mean, behind.low, behind.high) if behind else (None, None, None)
            rows.append((*job, name, *ends, standing.verdict))
    columns = [*CASE, "behind", "behind_low", "behind_high", "verdict"]
    return table.merge(pd.DataFrame(rows, columns=columns), on=CASE, how="left")


def time_over_fastest(data: pd.DataFrame) -> pd.DataFrame:
    """Time over the fastest strategy's of a job, geometric mean over all jobs at each seed, then mean over seeds.

    Returns:
        ``mean``, ``low`` and ``high`` (95% interval) by strategy, the fastest first; without strategies that lack a
        job at every seed.
    """
    good = data[data["status"] == "ok"]
    if good.empty:
        return pd.DataFrame(columns=["mean", "low", "high"], dtype=float)
    times = good.astype({"iteration_time_s": float}).pivot_table(
        "iteration_time_s", [*JOB, "seed"], "strategy", sort=False
    )
    means = times.groupby(level=JOB, sort=False).transform("mean")
    reference = times.where(means.eq(means.min(axis="columns"), axis="index")).bfill(axis="columns").iloc[:, 0]
    logs = times.div(reference, axis="index").map(np.log).groupby(level="seed")
    # The mean over all jobs, so a seed that lacks one has none.
    by_seed = logs.mean().where(logs.count().eq(logs.size(), axis="index")).map(np.exp)
    rows = {str(name): mean_interval(values.dropna().tolist()) for name, values in by_seed.items() if values.count()}
    table = pd.DataFrame([(name, each.mean, each.low, each.high) for name, each in rows.items()])
    table.columns = ["strategy", "mean", "low", "high"]
    return table.set_index("strategy").sort_values("mean", kind="stable")


def change(relative: Interval | None) -> str:
    """A ratio as a change with half the width of its interval: ``+12 ±3%``; without an interval ``+12%``."""
    if relative is None:
        return ""
    text = f"{100 * (relative.mean - 1):+.0f}".replace("-0", "+0")
    return f"{text} ±{100 * relative.margin:.1f}%" if relative.num_values > 1 else f"{text}%"


def starred(label: str, row: Mapping[Any, Any]) -> str:
    """A strategy's label, with a star if some of its seeds have no result."""
    return f"{label}*" if 0 < row["num_ok"] < row["num_runs"] else label


def lacking(table: pd.DataFrame, labels: Mapping[str, str], by: str = "strategy") -> str:
    """A sentence on what has no result or lacks seeds (``over_seeds``); empty if nothing does."""
    lost = table["num_runs"] - table["num_ok"]
    said = [
        f"{labels.get(str(name), str(name))} ({int(mine.sum())} runs: {table.loc[mine[mine > 0].index[0], 'status']})"
        for name, mine in lost.groupby(table[by], sort=False)
        if mine.sum()
    ]
    return f" Without result: {listing(said)}." if said else ""


def range_of(data: pd.DataFrame, table: pd.DataFrame, metric: str, form: str) -> str:
    """Means of a metric over all jobs, least and greatest: ``25% (DIP) to 60% (Megatron), mean over 3 jobs``."""
    labels = names(data, "strategy")
    jobs = table[JOB].drop_duplicates()
    # Strategies that lack a job would be compared on other jobs.
    by_strategy = table.groupby("strategy", sort=False)[metric].agg(["mean", "count"])
    means = by_strategy["mean"][by_strategy["count"] == len(jobs)]
    if means.empty:
        return "no strategy has a result on every job"
    ordered = [*means.sort_values(kind="stable").items()]
    ends = [f"{form.format(value)} ({labels[str(name)]})" for name, value in (ordered[0], ordered[-1])]
    return f"{' to '.join(ends)}, mean over {count(len(jobs), 'job')}"
