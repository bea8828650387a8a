"""Traces and their synthetic twins: labels, speedups on both, rank correlation between both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

import pandas as pd
import yaml

from entrain_bench.answers.labels import distinct_labels
from entrain_bench.answers.statistics import kendall_tau
from entrain_bench.config.tree import choices, config_tree

SIDES = TRACE, TWIN = "trace", "twin"


def labels_of_traces(traces: Sequence[str]) -> dict[str, str]:
    """Label of every trace: that of a workload that reads its file, else from its name."""
    stated: dict[str, str] = {}
    for name in choices("workload"):
        values = yaml.safe_load((config_tree() / "workload" / f"{name}.yaml").read_text())
        if values.keys() >= {"path", "label"}:
            stated.setdefault(PurePath(str(values["path"])).stem, str(values["label"]))
    return {trace: stated.get(trace, label) for trace, label in distinct_labels(traces).items()}


def speedups(data: pd.DataFrame) -> pd.DataFrame:
    """Speedup over the first strategy on each trace and its twin, and Kendall's tau of every trace.

    Means over the seeds at which a strategy and the first one both have a result.
    """
    good = data[data["status"] == "ok"]
    seconds = good.pivot_table("iteration_time_s", ["model", "trace", "strategy"], ["side", "seed"], sort=False)
    parts = []
    for _, rows in seconds.groupby(level=["model", "trace"], sort=False):
        by_seed = rows.iloc[0] / rows
        means = {side: pd.DataFrame(by_seed[side]).mean(axis="columns") for side in SIDES if side in by_seed}
        gains = pd.DataFrame(means, rows.index).reindex(columns=[*SIDES]).dropna()
        tau = kendall_tau(gains[TRACE].tolist(), gains[TWIN].tolist())
        parts.append(gains.rename(columns={side: f"{side}_speedup" for side in SIDES}).assign(tau=tau))
    return pd.concat(parts).reset_index()
