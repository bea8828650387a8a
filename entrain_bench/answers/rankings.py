"""How rankings change with settings: fastest strategies and rank correlations of labelled rows of runs."""

from __future__ import annotations

import numpy as np
import pandas as pd

from entrain_bench.answers.statistics import kendall_tau, mean_interval
from entrain_bench.answers.tables import compared, over_seeds

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
    found = []
    for row, runs in data.groupby("row", sort=False):
        comparisons, taus = compared(runs, CASE), correlations(first, runs)
        for case, mine in taus.items():
            names = comparisons[case].best
            firm = bool(usual[case].best) and usual[case].best[0] in names
            found.append((row, *case, next(iter(names), ""), firm, *_ends(mine)))
        found.append((row, ALL, ALL, "", True, *_ends(pd.DataFrame(taus).mean(axis="columns"))))
    columns = ["row", *CASE, "winner", "firm", "tau", "tau_low", "tau_high"]
    table = pd.DataFrame(found, columns=columns)
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
