"""Cases: a model on a workload under a setting, and how the strategies compare there."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pandas as pd

from entrain_bench.records.statistics import ratio_interval
from entrain_bench.records.tables import MISSING, fastest, high, low, over_seeds, without_result

# Columns of a run that all runs of a case share.
SHARED = ["setting", "model", "workload", "model_label", "workload_label", "cluster", "shared"]
STRATEGY = ["strategy", "strategy_label", "strategy_order", "own"]


@dataclass(frozen=True, slots=True)
class Case:
    """A model on a workload under a setting.

    Attributes:
        anchor: where the page has its commands.
        setting: how it differs from the main one; empty there.
        model, workload, cluster: their labels.
        runs: one row a strategy and seed, also of runs that are not there (``missing``).
        baseline: the strategy that others are compared with, the first by display order.
        best: the fastest strategy and those not significantly slower, in that order; empty if none has all results.
        summary: by strategy: ``num_runs``, ``num_ok``, ``status``, and means over seeds of the columns that
            ``summarised`` names; ``speedup`` over the baseline, ``speedup_low``, ``speedup_high``.
    """

    anchor: str
    setting: str
    model: str
    workload: str
    cluster: str
    runs: pd.DataFrame
    baseline: str
    best: tuple[str, ...]
    summary: Mapping[str, Mapping[Hashable, Any]]

    @property
    def labels(self) -> dict[str, str]:
        """What strategies are called."""
        return dict(zip(self.runs["strategy"], self.runs["strategy_label"], strict=True))

    @property
    def seeds(self) -> list[int]:
        """The seeds that are compared."""
        return sorted(self.runs["seed"].unique().tolist())

    @property
    def problems(self) -> list[str]:
        """A sentence on every strategy without all its results."""
        return without_result(self.runs)


def cases_of(table: pd.DataFrame) -> list[Case]:
    """The cases of a table of runs (``runs.compared``), those of the main setting first."""
    keys = ["setting", "model", "workload"]
    found = {tuple(map(str, key)): runs for key, runs in table.groupby(keys, sort=False)}
    order = sorted(found, key=lambda key: (key[0] != "", key))
    return [_case(f"runs-{place}", complete(found[key])) for place, key in enumerate(order, start=1)]


def complete(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs of a case at the seeds that most of its strategies have, with a row for every run that is not there."""
    strategies = runs.drop_duplicates("strategy")[STRATEGY]
    having = runs.groupby("seed")["strategy"].nunique()
    seeds = having[2 * having > len(strategies)].index.tolist() or having.index.tolist()
    mine = runs[runs["seed"].isin(seeds)]
    there = {*zip(mine["strategy"], mine["seed"], strict=True)}
    absent = [pair for pair in product(strategies["strategy"], seeds) if pair not in there]
    if not absent:
        return mine.reset_index(drop=True)
    lacking = pd.DataFrame(absent, columns=["strategy", "seed"]).merge(strategies, on="strategy")
    lacking = lacking.assign(status=MISSING, reason="not run", **{name: runs[name].iloc[0] for name in SHARED})
    return pd.concat([mine, lacking], ignore_index=True)


def _case(anchor: str, runs: pd.DataFrame) -> Case:
    best = fastest(runs.assign(case=anchor), ["case"]).get((anchor,), [])
    ordered = runs.drop_duplicates("strategy")
    # Without any stated order, the first by name.
    baseline = str(ordered.sort_values(["strategy_order", "strategy"], kind="stable")["strategy"].iloc[0])
    first = runs.iloc[0]
    return Case(
        anchor=anchor,
        setting=str(first["setting"]),
        model=str(first["model_label"]),
        workload=str(first["workload_label"]),
        cluster=str(first["cluster"]),
        runs=runs,
        baseline=baseline,
        best=tuple(best),
        summary=summarised(runs, baseline),
    )


def summarised(runs: pd.DataFrame, baseline: str) -> dict[str, dict[Hashable, Any]]:
    """Means over the seeds that succeeded, by strategy, and speed-ups over the baseline at shared seeds.

    ``busy_s`` and ``idle_s`` are the iteration time's parts by ``bubble_ratio``; ``step_s`` is what lies before the
    first forward and after the last backward, by ``core_time_s``.
    """
    seconds, idle = runs["iteration_time_s"], runs["bubble_ratio"]
    parts = runs.assign(busy_s=(1 - idle) * seconds, idle_s=idle * seconds, step_s=seconds - runs["core_time_s"])
    means = over_seeds(
        parts,
        ["strategy"],
        iteration_time_s=("iteration_time_s", "mean"),
        low_s=("iteration_time_s", low),
        high_s=("iteration_time_s", high),
        busy_s=("busy_s", "mean"),
        idle_s=("idle_s", "mean"),
        exposed_comm_s=("exposed_comm_s", "mean"),
        step_s=("step_s", "mean"),
        lower_bound_s=("lower_bound_s", "mean"),
    ).set_index("strategy")
    speedups = pd.DataFrame(_speedups(runs, baseline), columns=["strategy", "speedup", "speedup_low", "speedup_high"])
    table = means.join(speedups.set_index("strategy"))
    return {str(row.pop("strategy")): row for row in map(dict, table.reset_index().to_dict("records"))}


def _speedups(runs: pd.DataFrame, baseline: str) -> Iterator[tuple[str, float, float, float]]:
    """Speed-up over the baseline with its interval, of every strategy that shares a seed with it."""
    times = times_by_seed(runs)
    if baseline not in times:
        return
    for strategy in times:
        both = times[baseline].notna() & times[strategy].notna()
        if both.any():
            found = ratio_interval(times[baseline][both].tolist(), times[strategy][both].tolist())
            yield str(strategy), found.mean, found.low, found.high


def times_by_seed(runs: pd.DataFrame) -> pd.DataFrame:
    """Iteration times of the runs that succeeded: a row a seed, a column a strategy."""
    done = runs[runs["status"] == "ok"]
    return done.pivot_table("iteration_time_s", "seed", "strategy", sort=True)


def main_cases(cases: Sequence[Case]) -> list[Case]:
    """Those of the main setting."""
    return [case for case in cases if not case.setting]
