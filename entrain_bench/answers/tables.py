"""Tidy tables for figures: of run records and of timelines; fastest strategies and rank correlations by setting."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from entrain_bench.answers.comparison import TIME, Comparison, baseline_of, compare
from entrain_bench.answers.labels import in_order, label_columns, names, orders
from entrain_bench.answers.statistics import kendall_tau, mean_interval, ratio_interval
from entrain_bench.records.cells import Cell
from entrain_bench.records.leaves import flatten
from entrain_bench.records.records import Record, Results, labels_of
from entrain_bench.specs.module_layers import Role

# What is made of the values of several seeds: a name that pandas knows, or a function.
type Statistic = str | Callable[[pd.Series[float]], float]

# A cell whose record is absent; the other states are those of records.
MISSING = "missing"
# What a strategy does in a run that has no result.
STATUSES = {"failed": "fails", "skipped": "is skipped", MISSING: "has not run"}


@dataclass(frozen=True, slots=True)
class Runs:
    """A table with one row a cell (``run_table``), and one with a row an action and lane (``run_actions``)."""

    table: pd.DataFrame
    actions: pd.DataFrame


def run_table(cells: Sequence[Cell], results: Results, settings: Mapping[str, str] | None = None) -> pd.DataFrame:
    """The rows of ``table.csv`` for the given cells, by display order of the strategies, with ``label_columns``.

    A cell without a record has the status ``missing``. ``settings`` are further columns, by the path of the setting in
    the configuration (``workload.vision_share``).
    """
    rows = []
    for cell in cells:
        record = results.read(cell.key)
        if record is None:
            row: Mapping[str, Any] = {**labels_of(cell.config), "status": MISSING, "reason": "not run", "key": cell.key}
        else:
            row = record.row()
        leaves = flatten(cell.config.content()) if settings else {}
        swept = {column: leaves.get(path) for column, path in (settings or {}).items()}
        rows.append({**row, **swept, **label_columns(cell.config)})
    return in_order(pd.DataFrame(rows))


def run_actions(cells: Sequence[Cell], results: Results) -> pd.DataFrame:
    """Timelines of the first seed of every strategy, workload and model, where there is one.

    Returns:
        The columns of ``metrics.timeline_frame``, and before them ``strategy``, ``workload``, ``model``, ``seed`` and
        ``side``, the role of the action's module: ``encoder``, ``llm`` or ``generator``.
    """
    frames = []
    seen = set()
    for cell in cells:
        labels = labels_of(cell.config)
        names = ("strategy", "workload", "model")
        case = tuple(labels[name] for name in names)
        record = None if case in seen else results.read(cell.key)
        frame = results.timeline(record) if record else None
        if frame is None:
            continue
        seen.add(case)
        sides = {name: cell.config.model["modules"][name]["role"] for name in frame["module"].unique()}
        frame.insert(0, "side", frame["module"].map(sides))
        for name in ("seed", *reversed(names)):
            frame.insert(0, name, labels[name])
        frames.append(frame)
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=["strategy", "workload", "model"])


def encoder_stages_and_gpus(cell: Cell, record: Record | None) -> tuple[float, float]:
    """Return the stages of the model's encoders, which share theirs, and GPUs of a stage (TP x CP).

    Both are not numbers without a layout.
    """
    modules = cell.config.model["modules"]
    placed = {name: degrees for name, degrees in (record.degrees if record else {}).items() if name in modules}
    encoders = [degrees for name, degrees in placed.items() if modules[name]["role"] == Role.ENCODER]
    return max(((one["pp"], one["tp"] * one["cp"]) for one in encoders), default=(math.nan, math.nan))


def over_seeds(data: pd.DataFrame, keys: Sequence[str], **columns: tuple[str, Statistic]) -> pd.DataFrame:
    """One row for every combination of the keys: metrics by statistic over the runs with a result, and what failed.

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
    """Return iteration times relative to a reference's, over the seeds at which both succeeded (``ratio_interval``).

    There is one reference for every seed and combination of ``on``, which are some of the keys.

    Returns:
        ``relative``, ``relative_low`` and ``relative_high`` by the keys; no row where there is no such seed.
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
    """How the strategies of every case do, beside the first of them (``comparison``)."""
    comparisons = {}
    for key, runs in data.groupby([*case], sort=False):
        times = {str(name): times_by_seed(mine) for name, mine in runs.groupby("strategy", sort=False)}
        comparisons[tuple(map(str, key))] = compare(times, dict.fromkeys(times, baseline_of(orders(runs))))
    return comparisons


def times_by_seed(runs: pd.DataFrame) -> dict[int, float | None]:
    """Seconds an iteration of a strategy's runs, by seed; None for one that failed; lost runs are left out."""
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


CASE = ["model", "workload"]
# What stands for all models and traces together.
ALL = "all"


def rankings(data: pd.DataFrame) -> pd.DataFrame:
    """Fastest strategy and rank correlation of every row, model and trace, and of all of them together.

    Returns:
        Columns ``row``, ``model``, ``workload``, ``winner`` (empty where no strategy has all its runs), ``firm``
        (whether the first row's winner is as good as the best), ``tau``, ``tau_low``, ``tau_high``, ``num_ok`` and
        ``num_runs``, both of all strategies.
    """
    first = data[data["row"] == data["row"].iloc[0]]
    usual = compared(first, CASE)
    rows = []
    for row, runs in data.groupby("row", sort=False):
        comparisons = compared(runs, CASE)
        taus = correlations(first, runs)
        for case, mine in taus.items():
            names = comparisons[case].best
            firm = bool(usual[case].best) and usual[case].best[0] in names
            rows.append((row, *case, next(iter(names), ""), firm, *_ends(mine)))
        rows.append((row, ALL, ALL, "", True, *_ends(pd.DataFrame(taus).mean(axis="columns"))))
    columns = ["row", *CASE, "winner", "firm", "tau", "tau_low", "tau_high"]
    table = pd.DataFrame(rows, columns=columns)
    counts = over_seeds(data, ["row", *CASE], mean_s=("iteration_time_s", "mean"))
    return table.merge(counts[["row", *CASE, "num_ok", "num_runs"]], on=["row", *CASE], how="left")


def correlations(first: pd.DataFrame, runs: pd.DataFrame) -> dict[tuple[str, ...], pd.Series[float]]:
    """Rank correlation of the strategies' times with those of the first row, by model and trace, at every seed."""
    one, other = (
        table.assign(seconds=table["iteration_time_s"].where(table["status"] == "ok", np.inf))
        for table in (first, runs)
    )
    pairs = one.merge(other, on=[*CASE, "seed", "strategy"], suffixes=("", "_there"))
    taus: dict[tuple[str, ...], dict[int, float]] = {}
    for (*case, seed), mine in pairs.groupby([*CASE, "seed"], sort=False):
        tau = kendall_tau(mine["seconds"].tolist(), mine["seconds_there"].tolist())
        taus.setdefault(tuple(map(str, case)), {})[int(str(seed))] = tau
    return {case: pd.Series(by_seed) for case, by_seed in taus.items()}


def _ends(values: pd.Series[float]) -> tuple[float, float, float]:
    interval = mean_interval(values.tolist())
    return interval.mean, max(interval.low, -1.0), min(interval.high, 1.0)
