"""The page of results as a table to filter and sort: committed runs of unchanged strategies and data."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from entrain_bench import compose
from entrain_bench.answers.statistics import mean_interval, ratio_interval
from entrain_bench.answers.text import speedup
from entrain_bench.config.comments import documented_keys
from entrain_bench.config.tree import choices
from entrain_bench.records.leaves import parameters_text, setting_text
from sitegen.tables import Cell, Column, Row, html_table

TIME = "iteration_time_s"
BASELINE = "megatron"
SIMULATED = "simulate"
# Keys of a job, by their columns; jobs with fewer strategies compare too little.
JOB = {
    **{
        name: name
        for name in ("model", "workload", "cluster", "global_batch", "microbatch_size", "iterations", "tuning")
    },
    **{f"layout_{name}": f"layout.{name}" for name in ("tp", "cp", "pp", "dp")},
}
MIN_STRATEGIES = 3
COLUMNS = (
    *(Column("workload", filtered=True), Column("model", filtered=True), Column("cluster", filtered=True)),
    *(Column("degrees", filtered=True), Column("batch / microbatch"), Column("strategy", filtered=True)),
    *(Column("seconds per iteration", numbers=True), Column("speedup over Megatron", numbers=True)),
    *(Column("idle", numbers=True), Column("memory, GiB", numbers=True), Column("seeds", numbers=True)),
)
GIB = 2**30
# The column of strategies.
STRATEGY = 5


def results_page(rows: Sequence[Row]) -> str:
    """Return the page; links are those of the repository, from its root."""
    parts = [
        "# All results",
        "Every row is a strategy on a job: the mean over seeds ± half of its 95% interval, and the speedup over "
        "Megatron at the same seeds with its 95% interval ([metrics](docs/metrics.md)). Simulated. Strategies, data "
        "and settings are unchanged, so the command of a row makes its runs again. Click a heading to sort.",
        html_table("results", COLUMNS, rows),
    ]
    return "\n\n".join(parts) + "\n"


def result_rows(table: pd.DataFrame, labels: Mapping[str, str]) -> Iterator[Row]:
    """Yield a row for every job and strategy of the suite, fastest first within a job.

    Runs count whose strategy, data and settings are those that their names and the keys of ``JOB`` choose, so that the
    row's command makes them again.
    """
    job = [name for name in JOB if name in table]
    runs = table[[_is_plain(row) for row in table.to_dict("records")]]
    cases = [(case, group) for case, group in runs.groupby(job, dropna=False, sort=True)]
    counts = [group["strategy"].nunique() for _, group in cases]
    # Jobs with most strategies first.
    for place in sorted(range(len(cases)), key=lambda place: -counts[place]):
        case, group = cases[place]
        if counts[place] < MIN_STRATEGIES:
            continue
        values = dict(zip(job, case, strict=True))
        base = _times(group[group["strategy"] == BASELINE])
        means = group.groupby("strategy")[TIME].mean()
        for strategy in means.sort_values(kind="stable", na_position="last").index:
            own = group[group["strategy"] == strategy]
            yield _row(values, str(strategy), own, base, labels)


def _row(
    job: Mapping[str, Any],
    strategy: str,
    runs: pd.DataFrame,
    base: Mapping[int, float],
    labels: Mapping[str, str],
) -> Row:
    times = _times(runs)
    lacking = len(runs) - len(times)
    if times:
        mean = mean_interval([*times.values()])
        seconds = f"{mean.mean:.3f}" + (f" ± {(mean.high - mean.low) / 2:.3f}" if len(times) > 1 else "")
        shared = [seed for seed in times if seed in base]
        ratio = ratio_interval([base[seed] for seed in shared], [times[seed] for seed in shared]) if shared else None
    else:
        mean = None
        ratio = None
        seconds = str(runs["status"].iloc[0])
    note = f", {lacking} failed" if lacking and times else ""
    cells = (
        *(Cell(str(job["workload"])), Cell(str(job["model"])), Cell(str(job["cluster"])), Cell(_degrees(job))),
        Cell(_batch(job), value=float(job["global_batch"])),
        Cell(labels.get(strategy, strategy), link=f"strategies/{strategy}.html", strong=strategy == BASELINE),
        Cell(seconds + note, value=mean.mean if mean else ""),
        Cell(speedup(ratio), value=ratio.mean if ratio else ""),
        _number(runs["bubble_ratio"].mean(), lambda value: f"{100 * value:.0f}%"),
        _number(runs["peak_memory_bytes"].max() / GIB, lambda value: f"{value:.1f}"),
        Cell(str(len(runs)), value=float(len(runs))),
    )
    return Row("", cells, [command(job, strategy, runs)])


def command(job: Mapping[str, Any], strategy: str, runs: pd.DataFrame) -> str:
    """The command that makes the runs of a row again; keys with their default are left out."""
    seeds = sorted(runs["seed"])
    defaults = {key.name: key.default for key in documented_keys()}
    values = {JOB[name]: "null" if pd.isna(value) else str(value) for name, value in job.items()}
    changed = [f"{key}={value}" for key, value in values.items() if defaults.get(key) != value]
    several = seeds == [*range(len(seeds))] and len(seeds) > 1
    seed = f"seed=range({len(seeds)})" if several else f"seed={','.join(map(str, seeds))}"
    words = ["--multirun"] if len(seeds) > 1 else []
    return shlex.join(["entrain-bench", *words, f"strategy={strategy}", *changed, seed])


def _number(value: float, spell: Any) -> Cell:
    return Cell("", value="") if pd.isna(value) else Cell(spell(value), value=float(value))


def _times(runs: pd.DataFrame) -> dict[int, float]:
    done = runs[runs["status"] == "ok"]
    return dict(zip(done["seed"].astype(int), done[TIME].astype(float), strict=True))


def _degrees(job: Mapping[str, Any]) -> str:
    degrees = {name: job[f"layout_{name}"] for name in ("tp", "cp", "pp", "dp")}
    stated = [
        f"{name.upper()} {value}" for name, value in degrees.items() if pd.notna(value) and (name, value) != ("cp", 1)
    ]
    return ", ".join(stated) or "planner's choice"


def _batch(job: Mapping[str, Any]) -> str:
    size = job["microbatch_size"]
    return f"{job['global_batch']} / {'any' if pd.isna(size) else size}"


def _is_plain(row: Mapping[Any, Any]) -> bool:
    """Whether the names and the keys of a job say everything about a run."""
    names = row["strategy"], row["workload"]
    if row["harness"] != SIMULATED or row["variant"] or row["cluster"] not in choices("cluster"):
        return False
    parameters = _parameters(*map(str, names))
    if parameters != (
        row["strategy_parameters"],
        row["workload_parameters"],
        row["planner"],
        row["assigner"],
        row["scheduler"],
    ):
        return False
    return all(
        row[name] == value or (pd.isna(row[name]) and not value) for name, value in _settings().items() if name in row
    )


@cache
def _parameters(strategy: str, workload: str) -> tuple[str, ...] | None:
    if strategy not in choices("strategy") or workload not in choices("workload"):
        return None
    config = _composed(f"strategy={strategy}"), _composed(f"workload={workload}")
    parts = (
        str(config[0].strategy[part]["_target_"]).rpartition(".")[2] for part in ("planner", "assigner", "scheduler")
    )
    return (parameters_text(config[0].strategy), parameters_text(config[1].workload), *parts)


@cache
def _composed(override: str) -> Any:
    return compose(override)


@cache
def _settings() -> dict[str, Any]:
    """Defaults of the other keys of a run, by their columns."""
    aside = {*JOB.values(), "seed", "strategy", "harness", "figure", "results_dir", "retry"}
    keys = [key for key in documented_keys() if key.name not in aside and not key.name.startswith("mlflow")]
    values = {key.name.removesuffix(".*").replace(".", "_"): yaml.safe_load(key.default) for key in keys}
    values["speed"] = setting_text({"any": 1.0})
    return {name: setting_text(value) if value is not None else None for name, value in values.items()}


def read_table(root: Path) -> pd.DataFrame:
    """The committed table of runs."""
    return pd.read_parquet(root / "results" / "reference" / "table.parquet")
