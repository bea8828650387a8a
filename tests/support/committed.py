"""The data of committed figures, made of their CSVs: what ``draw`` takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from entrain_bench.answers.labels import families, in_order, orders
from entrain_bench.records.time_shares import TIME_SHARES

FIGURES = Path(__file__).parents[2] / "results" / "reference" / "figures"
# Metrics of which a CSV of runs has means.
METRICS = ["iteration_time_s", "lower_bound_s", "tflops_per_gpu", *TIME_SHARES]


def committed(name: str) -> pd.DataFrame:
    """The data of a figure: its CSV, or runs with its means."""
    table = pd.read_csv(FIGURES / f"{name}.csv", keep_default_na=False, na_values=[""])
    if name in ("schedule_gantt", "measured_gantt"):
        sides = table["module"].map(lambda module: "llm" if module == "llm" else "encoder")
        table = table.assign(side=table.get("side", sides))
        # Older files have another order of strategies than the figure.
        return of_strategies(table).drop(columns=["seed", "status", "reason"]) if name == "schedule_gantt" else table
    if name == "forward_variability":
        wide = table.pivot(index=["model", "workload", "strategy"], columns="side", values="std_ms").reset_index()
        return of_strategies(
            wide.rename(columns=lambda side: f"{side}_forward_std_ms" if side in ("encoder", "llm") else side)
        )
    if name == "twins":
        return of_strategies(table.assign(iteration_time_s=1 / table["speedup"], workload=table["trace"]))
    if name == "sensitivity":
        own = table[table["planned"]].assign(forced_stages=None)
        return runs_of(pd.concat([table.assign(forced_stages=table["encoder_stages"]), own], ignore_index=True))
    return table if name == "robustness" or "num_runs" not in table else runs_of(table)


def runs_of(table: pd.DataFrame) -> pd.DataFrame:
    """Runs at as many seeds as a table of means says, of equal shares, each a little slower than the last."""
    metrics = [name for name in METRICS if name in table]
    rows: list[dict[str, Any]] = []
    for row in table.to_dict("records"):
        for seed in range(row["num_runs"]):
            if seed < row["num_ok"]:
                values = {name: row[name] * (1 + 0.01 * seed * name.endswith("_s")) for name in metrics}
                rows.append({**row, **values, "seed": seed, "status": "ok", "reason": ""})
            else:
                rows.append({**row, **dict.fromkeys(metrics), "seed": seed})
    return of_strategies(pd.DataFrame(rows))


def of_strategies(table: pd.DataFrame) -> pd.DataFrame:
    """Runs by display order, with what is stated of their strategies."""
    if "strategy" not in table:
        return table.assign(strategy="entrain")
    stated = {"seed": 0, "status": "ok", "reason": ""}
    table = table.assign(**{name: value for name, value in stated.items() if name not in table})
    place = table["strategy"].map(orders(table)).astype(float)
    return in_order(table.assign(strategy_order=place, strategy_family=table["strategy"].map(families(table))))
