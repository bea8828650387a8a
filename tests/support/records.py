"""Made-up records of runs."""

from __future__ import annotations

from typing import Any

from entrain_bench.records.records import Record

ORDER = {"first": 0, "second": 1}


def record(strategy: str, time_s: float | None, seed: int = 0, workload: str = "text", **config: Any) -> Record:
    """A run; without a time it failed."""
    own = {"name": strategy, "display_order": ORDER.get(strategy), **config.pop("own", {})}
    labels = {"strategy": strategy, "workload": workload, "model": "m", "cluster": "c", "harness": "h", "seed": seed}
    content = {"strategy": own, "workload": {"name": workload}, "seed": seed, **config}
    key = f"{strategy}{workload}{seed}{config}{own}"
    status, reason = ("ok", "") if time_s else ("failed", "out of luck")
    metrics = {"iteration_time_s": time_s} if time_s else {}
    return Record(key, status, reason, labels, content, "code", metrics=metrics)
