"""Made-up runs for the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from entrain_bench.answers.report.build import Material
from entrain_bench.answers.report.runs import IDENTITY
from entrain_bench.records.records import METRICS

USUAL = {"cluster": "small", "harness": "simulate", "belief_error": "0.0", "global_batch": "32"}


def runs(times: Mapping[str, Sequence[float | None]], workload: str = "coco", **changes: Any) -> pd.DataFrame:
    """A run for every strategy and seed; None for one that failed."""
    rows = []
    for place, (strategy, seconds) in enumerate(times.items()):
        for seed, second in enumerate(seconds):
            labels = {
                "strategy": strategy,
                "strategy_order": place,
                "workload": workload,
                "model": "tiny",
                "seed": seed,
                "own": f"strategy={strategy}",
                "shared": f"workload={workload} model=tiny",
                "cost_source": "fitted",
                "status": "ok" if second else "failed",
                "reason": "" if second else "told so",
                **dict.fromkeys(("strategy_label", "workload_label", "model_label"), ""),
                **dict.fromkeys(("host", "code_version", "key"), "some"),
            }
            rows.append({**dict.fromkeys(IDENTITY, ""), **USUAL, **labels, **_metrics(second), **changes})
    return pd.DataFrame(rows)


def _metrics(seconds: float | None) -> dict[str, float | None]:
    """A quarter of the time is idle, a tenth is step."""
    if seconds is None:
        return dict.fromkeys(METRICS)
    shares = {"core_time_s": 0.9, "exposed_comm_s": 0.05, "lower_bound_s": 0.5, "iteration_time_s": 1.0}
    return {**dict.fromkeys(METRICS), **{name: seconds * share for name, share in shares.items()}, "bubble_ratio": 0.25}


def material(*tables: pd.DataFrame, **others: Any) -> Material:
    """What a page is made of."""
    return Material(pd.concat(tables, ignore_index=True), USUAL, "1.0", **others)
