"""Cases: a model on a workload under a setting, and how the strategies compare there."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pandas as pd

from entrain_bench.answers.comparison import TIME, Comparison, baseline_of
from entrain_bench.answers.labels import orders
from entrain_bench.answers.tables import MISSING, compared, over_seeds, without_result

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
        comparison: how the strategies do.
        summary: by strategy: ``num_runs``, ``num_ok``, ``status``, and means over seeds of the columns that
            ``summarised`` names.
    """

    anchor: str
    setting: str
    model: str
    workload: str
    cluster: str
    runs: pd.DataFrame
    baseline: str
    comparison: Comparison[str]
    summary: Mapping[str, Mapping[Hashable, Any]]

    @property
    def best(self) -> Sequence[str]:
        """The fastest strategy and those not significantly slower, in that order; empty if none has all results."""
        return self.comparison.best

    @property
    def labels(self) -> dict[str, str]:
        """What strategies are called."""
        return dict(zip(self.runs["strategy"], self.runs["strategy_label"], strict=True))

    @property
    def seeds(self) -> list[int]:
        """The seeds that are compared."""
        return self.comparison.seeds

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
    (comparison,) = compared(runs.assign(case=anchor), ["case"]).values()
    first = runs.iloc[0]
    return Case(
        anchor=anchor,
        setting=str(first["setting"]),
        model=str(first["model_label"]),
        workload=str(first["workload_label"]),
        cluster=str(first["cluster"]),
        runs=runs,
        baseline=baseline_of(orders(runs)),
        comparison=comparison,
        summary=summarised(runs),
    )


def summarised(runs: pd.DataFrame) -> dict[str, dict[Hashable, Any]]:
    """Means over the seeds that succeeded, by strategy.

    ``busy_s`` and ``idle_s`` are the iteration time's parts by ``bubble_ratio``; ``step_s`` is what lies before the
    first forward and after the last backward, by ``core_time_s``.
    """
    seconds, idle = runs[TIME], runs["bubble_ratio"]
    parts = runs.assign(busy_s=(1 - idle) * seconds, idle_s=idle * seconds, step_s=seconds - runs["core_time_s"])
    names = (TIME, "busy_s", "idle_s", "exposed_comm_s", "step_s", "lower_bound_s")
    means = over_seeds(parts, ["strategy"], **{name: (name, "mean") for name in names})
    return {str(row.pop("strategy")): row for row in map(dict, means.to_dict("records"))}


def main_cases(cases: Sequence[Case]) -> list[Case]:
    """Those of the main setting."""
    return [case for case in cases if not case.setting]
