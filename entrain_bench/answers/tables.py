"""Tidy tables of run records and of timelines: means and ratios over seeds, the fastest, runs without a result."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from entrain_bench.answers.comparison import TIME, Comparison, baseline_of, compare
from entrain_bench.answers.labels import in_order, label_columns, names, orders
from entrain_bench.answers.statistics import kendall_tau, mean_interval, ratio_interval
from entrain_bench.answers.text import count, listing
from entrain_bench.base.arithmetic import exp, log
from entrain_bench.records.cells import Cell
from entrain_bench.records.leaves import flatten
from entrain_bench.records.records import Record, Results, labels_of
from entrain_bench.records.tables import with_bounds
from entrain_bench.specs.module_layers import Role

# The summary of several seeds' values: a name that pandas knows, or a function.
type Statistic = str | Callable[[pd.Series[float]], float]

# A cell whose record is absent; the other states are those of records.
MISSING = "missing"
JOB = ["model", "workload"]
CASE = [*JOB, "strategy"]
TIMES = ["iteration_time_s", "lower_bound_s"]
# The name of all models and traces together.
ALL = "all"
# Verbs of runs that have no result.
STATUSES = {"failed": "fails", "skipped": "is skipped", MISSING: "has not run"}


def run_table(cells: Sequence[Cell], results: Results, settings: Mapping[str, str] | None = None) -> pd.DataFrame:
    """The rows of ``table.csv`` for the given cells, by display order of the strategies, with ``label_columns``.

    A cell without a record has the status ``missing``. ``settings`` are further columns, by the path of the setting in
    the configuration (``workload.vision_share``).
    """
    rows = []
    for cell in cells:
        record = results.read(cell.key)
        absent = {**labels_of(cell.config), "status": MISSING, "reason": "not run", "key": cell.key}
        row = with_bounds(record).row if record else absent
        leaves = flatten(cell.config.content()) if settings else {}
        swept = {column: leaves.get(path) for column, path in (settings or {}).items()}
        rows.append({**row, **swept, **label_columns(cell.config)})
    return in_order(pd.DataFrame(rows))


def run_actions(cells: Sequence[Cell], results: Results) -> pd.DataFrame:
    """Timelines of the first seed of every strategy, workload and model, where there is one.

    They are those of ``timeline_frame``, with the labels of the run and ``side``, the role of the action's module.
    """
    frames: dict[tuple[str, ...], pd.DataFrame] = {}
    for cell in cells:
        labels = labels_of(cell.config)
        case = {name: labels[name] for name in CASE}
        key = tuple(case.values())
        record = None if key in frames else results.read(cell.key)
        frame = results.timeline(record) if record else None
        if frame is not None:
            roles = {name: module["role"] for name, module in cell.config.model["modules"].items()}
            frames[key] = frame.assign(**case, seed=labels["seed"], side=frame["module"].map(roles))
    return pd.concat(frames.values(), ignore_index=True) if frames else pd.DataFrame(columns=CASE)


def encoder_stages_and_gpus(cell: Cell, record: Record | None) -> tuple[float, float]:
    """Return the stages of the model's encoders, and GPUs of a stage (TP x CP); not numbers without a layout."""
    modules = cell.config.model["modules"]
    placed = {name: degrees for name, degrees in (record.degrees if record else {}).items() if name in modules}
    encoders = [degrees for name, degrees in placed.items() if modules[name]["role"] == Role.ENCODER]
    return max(((one["pp"], one["tp"] * one["cp"]) for one in encoders), default=(math.nan, math.nan))


def over_seeds(data: pd.DataFrame, keys: Sequence[str], **columns: tuple[str, Statistic]) -> pd.DataFrame:
    """One row for every combination of the keys: metrics by statistic over the runs with a result, and failed runs.

    Returns:
        The keys, ``num_runs``, the columns, ``num_ok``, ``status`` and ``reason`` of the first run without success.
    """
    metrics = list(dict.fromkeys(metric for metric, _ in columns.values()))
    done = data[data["status"] == "ok"].reindex(columns=[*keys, *metrics]).astype(dict.fromkeys(metrics, float))
    statistics = done.groupby([*keys], sort=False).agg(**columns, num_ok=(metrics[0], "size"))
    cells = data.groupby([*keys], sort=False).agg(num_runs=("status", "size"))
    problems = data[data["status"] != "ok"].groupby([*keys], sort=False)[["status", "reason"]].first()
    table = cells.join(statistics).join(problems).fillna({"num_ok": 0, "status": "ok", "reason": ""})
    return table.reset_index().astype({"num_ok": int})


def interval_over_seeds(data: pd.DataFrame, keys: Sequence[str], metric: str) -> pd.DataFrame:
    """The mean of one metric by ``over_seeds``; ``<metric>_low`` and ``<metric>_high`` are its interval's ends."""
    columns: dict[str, tuple[str, Statistic]] = {
        metric: (metric, "mean"),
        f"{metric}_low": (metric, lambda values: mean_interval(values.tolist()).low),
        f"{metric}_high": (metric, lambda values: mean_interval(values.tolist()).high),
    }
    return over_seeds(data, keys, **columns)


def relative_over_seeds(
    data: pd.DataFrame, references: pd.DataFrame, keys: Sequence[str], on: Sequence[str]
) -> pd.DataFrame:
    """Return ``relative``: iteration times over a reference's by the keys, at the seeds at which both succeeded.

    There is one reference for every seed and combination of ``on``, which are some of the keys.
    """
    runs, other = (
        table[table["status"] == "ok"].reindex(columns=[*keys, "seed", TIME]) for table in (data, references)
    )
    pairs = runs.merge(other[[*on, "seed", TIME]], on=[*on, "seed"], suffixes=("", "_reference"))
    rows = []
    for case, group in pairs.groupby([*keys], sort=False):
        ratio = ratio_interval(group[TIME].tolist(), group[f"{TIME}_reference"].tolist())
        rows.append((*case, ratio.mean, ratio.low, ratio.high))
    columns = ["relative", "relative_low", "relative_high"]
    return pd.DataFrame(rows, columns=[*keys, *columns]).set_index([*keys]).astype(float)


def compared(data: pd.DataFrame, case: Sequence[str]) -> dict[tuple[str, ...], Comparison[str]]:
    """The strategies of every case, compared with the first of them (``comparison``)."""
    comparisons = {}
    for key, runs in data.groupby([*case], sort=False):
        times = {str(name): times_by_seed(mine) for name, mine in runs.groupby("strategy", sort=False)}
        comparisons[tuple(map(str, key))] = compare(times, dict.fromkeys(times, baseline_of(orders(runs))))
    return comparisons


def times_by_seed(runs: pd.DataFrame) -> dict[int, float | None]:
    """Seconds per iteration of a strategy's runs, by seed; None for one that failed; lost runs are left out."""
    there = runs[runs["status"] != MISSING]
    done = there[TIME].where(there["status"] == "ok")
    return {int(seed): None if pd.isna(time) else time for seed, time in zip(there["seed"], done, strict=True)}


def without_result(data: pd.DataFrame) -> list[str]:
    """A sentence on every strategy, workload and model some of whose runs have no result: at which seeds, and why."""
    labels = {column: names(data, column) for column in ("strategy", "workload", "model")}
    sentences = []
    for case, runs in data[data["status"] != "ok"].groupby([*labels, "status"], sort=False):
        *values, status = map(str, case)
        strategy, workload, model = (labels[column][value] for column, value in zip(labels, values, strict=True))
        seeds = sorted(runs["seed"])
        at = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
        sentences.append(f"{strategy} {STATUSES[status]} at {at} on {model} {workload}: {runs['reason'].iloc[0]}")
    return sentences


def rankings(data: pd.DataFrame) -> pd.DataFrame:
    """Fastest strategy and rank correlation (``tau``) of every row, model and trace, and of all of them together.

    ``winner`` is empty where no strategy has all its runs; ``firm``: whether the first row's winner is as good.
    """
    first = data[data["row"] == data["row"].iloc[0]]
    usual = compared(first, JOB)
    rows = []
    for row, runs in data.groupby("row", sort=False):
        comparisons = compared(runs, JOB)
        taus = correlations(first, runs)
        cases: list[tuple[str, ...]] = [*taus]
        for case in cases:
            names = comparisons[case].best
            firm = bool(usual[case].best) and usual[case].best[0] in names
            rows.append((row, *case, next(iter(names), ""), firm, *_ends(taus[case].dropna())))
        rows.append((row, ALL, ALL, "", True, *_ends(taus.mean(axis="columns"))))
    columns = ["row", *JOB, "winner", "firm", "tau", "tau_low", "tau_high"]
    table = pd.DataFrame(rows, columns=columns)
    counts = over_seeds(data, ["row", *JOB], mean_s=("iteration_time_s", "mean"))
    return table.merge(counts[["row", *JOB, "num_ok", "num_runs"]], on=["row", *JOB], how="left")


def correlations(first: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Rank correlation of the strategies' times with the first row's: a row a seed, a column a model and trace."""
    case = [*JOB, "seed"]
    one, other = (table.assign(s=table[TIME].where(table["status"] == "ok", np.inf)) for table in (first, runs))
    pairs = one.merge(other, on=[*case, "strategy"], suffixes=("", "_there")).groupby(case, sort=False)
    taus = pairs[["s", "s_there"]].apply(lambda mine: kendall_tau(mine["s"].tolist(), mine["s_there"].tolist()))
    return pd.DataFrame(taus.unstack(JOB, sort=False))


def _ends(values: pd.Series[float]) -> tuple[float, float, float]:
    interval = mean_interval(values.tolist())
    return interval.mean, max(interval.low, -1.0), min(interval.high, 1.0)


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


def summarise(data: pd.DataFrame) -> pd.DataFrame:
    """Means, intervals and failures by model, workload and strategy.

    ``speedup`` is over the first strategy; ``behind``, the time over the fastest's, is empty for the fastest.
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
    """Time over the fastest strategy's of a job, geometric mean over jobs at each seed, then mean over seeds.

    A row per strategy, the fastest first: ``mean``, ``low`` and ``high`` (95% CI), and ``num_jobs`` of which it has
    a result; its mean is over these. A strategy without a seed with all of them has no row.
    """
    columns = ["strategy", "mean", "low", "high", "num_jobs"]
    good = data[data["status"] == "ok"].astype({"iteration_time_s": float})
    rows = []
    if len(good):
        times = good.pivot_table("iteration_time_s", [*JOB, "seed"], "strategy", sort=False)
        means = times.groupby(level=JOB, sort=False).transform("mean")
        reference = times.where(means.eq(means.min(axis="columns"), axis="index")).bfill(axis="columns").iloc[:, 0]
        logs = times.div(reference, axis="index").map(log, na_action="ignore")
        num_jobs = logs.groupby(level=JOB, sort=False).count().gt(0).sum()
        by_seed = logs.groupby(level="seed").mean().where(logs.groupby(level="seed").count().eq(num_jobs))
        for name, values in by_seed.map(exp, na_action="ignore").items():
            if values.count():
                each = mean_interval(values.dropna().tolist())
                rows.append((str(name), each.mean, each.low, each.high, num_jobs[str(name)]))
    table = pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(columns[1:4], float))
    return table.set_index("strategy").sort_values("mean", kind="stable")


def lacking(table: pd.DataFrame, labels: Mapping[str, str], by: str = "strategy") -> str:
    """A sentence on runs without a result and missing seeds (``over_seeds``); empty if nothing does."""
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


def split_times(data: pd.DataFrame) -> pd.DataFrame:
    """Times of forced splits into stages (``interval_over_seeds``), over those of the best split of model and trace.

    ``planned``: whether the planner takes the split unforced (``forced_stages`` is empty), at any seed.
    """
    keys = [*JOB, "encoder_stages"]
    forced = data[data["forced_stages"].notna()].astype({"encoder_stages": int})
    table = interval_over_seeds(forced, keys, TIME)
    best = table.sort_values(TIME, kind="stable").drop_duplicates(JOB)[keys]
    table = table.join(relative_over_seeds(forced, forced.merge(best, on=keys), keys, JOB), on=keys)
    free = data[data["forced_stages"].isna() & data["encoder_stages"].notna()]
    chosen = {*free[keys].astype({"encoder_stages": int}).itertuples(index=False, name=None)}
    return table.assign(planned=[case in chosen for case in table[keys].itertuples(index=False, name=None)])


def forward_std(data: pd.DataFrame) -> pd.DataFrame:
    """The metrics ``<side>_forward_std_ms`` as ``std_ms`` with its interval, over the seeds that succeeded."""
    sides = []
    for side in (Role.ENCODER, Role.LLM):
        metric = f"{side}_forward_std_ms"
        means = interval_over_seeds(data, CASE, metric)
        means.columns = means.columns.str.replace(metric, "std_ms")
        columns = [*CASE, "side", "std_ms", "std_ms_low", "std_ms_high"]
        sides.append(means[means["num_ok"] > 0].assign(side=str(side))[columns])
    return pd.concat(sides, ignore_index=True)


def winners(data: pd.DataFrame, overall: pd.DataFrame, labels: Mapping[str, str]) -> str:
    """Sentences on the fastest of every job, and on the runner-up over all jobs (``time_over_fastest``)."""
    fastest = [next(iter(comparison.best), "") for comparison in compared(data, JOB).values()]
    often = sorted({*fastest} - {""}, key=lambda name: -fastest.count(name))
    said = ", ".join(f"{labels[name]} in {fastest.count(name)}" for name in often) or "none is decided"
    first = f"Fastest of {len(fastest)} job{'s' if len(fastest) > 1 else ''}: {said}."
    if len(overall) < 2:
        return first
    second = overall.iloc[1]
    return f"{first} Over all jobs, {labels[str(second.name)]} is the runner-up with {second['mean']:.2f}x the time."
