"""Made-up records of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from entrain_bench.records.records import Record

ORDER = {"first": 0, "second": 1}
PARTS = ("planner", "assigner", "scheduler")


def record(strategy: str, time_s: float | None, seed: int = 0, workload: str = "text", **config: Any) -> Record:
    """A run; without a time it failed. A quarter of the time is idle, a tenth is step."""
    own = {"name": strategy, "display_order": ORDER.get(strategy), **config.pop("own", {})}
    labels = {"strategy": strategy, "workload": workload, "model": "m", "cluster": "c", "harness": "h", "seed": seed}
    content = {
        "strategy": own,
        "workload": {"name": workload},
        "cluster": {"device": {}},
        "layout": dict.fromkeys(("tp", "cp", "pp", "dp")),
        "seed": seed,
        **config,
    }
    key = f"{strategy}{workload}{seed}{config}{own}"
    status, reason = ("ok", "") if time_s else ("failed", "out of luck")
    shares = {"iteration_time_s": 1.0, "core_time_s": 0.9, "exposed_comm_s": 0.05, "lower_bound_s": 0.5}
    metrics = {name: share * time_s for name, share in shares.items()} | {"bubble_ratio": 0.25} if time_s else {}
    overrides = (f"strategy={strategy}", f"workload={workload}", *(f"{k}={v}" for k, v in config.items()))
    made = {"overrides": (*overrides, f"seed={seed}"), "made_at": "2026-11-23T00:00:00+00:00"}
    return Record(
        key, status, reason, {**labels, **dict.fromkeys(PARTS, "Some")}, content, "code", metrics=metrics, **made
    )


def runs(times: Mapping[str, Sequence[float | None]], workload: str = "coco", **config: Any) -> list[Record]:
    """A run for every strategy and seed, strategies in display order; None for one that failed."""
    return [
        record(name, seconds, seed, workload, own={"display_order": place}, **config)
        for place, (name, each) in enumerate(times.items())
        for seed, seconds in enumerate(each)
    ]


def at_seeds(records: Sequence[Record], strategy: str, *seeds: int) -> list[Record]:
    return [each for each in records if each.labels["strategy"] != strategy or each.labels["seed"] in seeds]


def aged(records: Sequence[Record], code_version: str) -> list[Record]:
    return [replace(each, key=f"{each.key}{code_version}", code_version=code_version) for each in records]
