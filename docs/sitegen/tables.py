"""Tables that a reader filters and sorts (``static/table.js``): committed results, and claims with their verdicts."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from entrain_bench.answers.documents.claims import claim_commands, claim_row
from entrain_bench.answers.documents.verdict import JudgedClaim
from entrain_bench.answers.statistics import mean_interval, ratio_interval
from entrain_bench.answers.text import NOTHING, speedup
from entrain_bench.config.comments import documented_keys
from entrain_bench.config.compose import compose
from entrain_bench.config.tree import choices
from entrain_bench.records.leaves import parameters_text, setting_text

TIME = "iteration_time_s"
BASELINE = "megatron"
DEGREES = ("tp", "cp", "pp", "dp")
JOB_KEYS = (
    *("model", "workload", "cluster", "global_batch", "microbatch_size", "iterations", "tuning"),
    *(f"layout.{name}" for name in DEGREES),
)
# By their columns.
JOB = {key.replace(".", "_"): key for key in JOB_KEYS}
# Jobs with fewer strategies compare too little.
MIN_STRATEGIES = 3
PARTS = ("planner", "assigner", "scheduler")
# Commands of a claim's row: those of the settings that have a verdict in it.
SETTINGS = ("as published", "fair")


def results_page(table: pd.DataFrame) -> str:
    """The page of committed results, a row for each job and strategy."""
    strategies = [f'<a href="strategies/{name}.html">{escape(name)}</a>' for name in table["strategy"]]
    shown = table.drop(columns=["strategy", "command"]).astype(str).map(escape)
    shown.insert(4, "strategy", strategies)
    return (
        "# All results\n\nEvery row is a strategy on a job: the mean over seeds ± half of its 95% interval, and the "
        "speedup over Megatron at the same seeds with its 95% interval ([metrics](metrics.md)). Simulated. Strategies, "
        "data and settings are unchanged, so the command of a row makes its runs again. Click a heading to sort.\n\n"
        + html_table("results", shown, table["command"], ["workload", "model", "cluster", "degrees", "strategy"])
    )


def results_table(path: Path) -> pd.DataFrame:
    """A row for each job and strategy of a committed table: jobs with most strategies and fastest strategies first.

    Its runs are those whose strategy, data and settings are what their names and keys of ``JOB`` choose.
    """
    runs = plain_runs(pd.read_parquet(path))
    jobs = [(case, group) for case, group in runs.groupby([*JOB], dropna=False, sort=True)]
    jobs.sort(key=lambda job: -job[1]["strategy"].nunique())
    rows = []
    for case, group in jobs:
        if group["strategy"].nunique() < MIN_STRATEGIES:
            continue
        job = dict(zip(JOB, case, strict=True))
        base = group[group["strategy"] == BASELINE]
        means = group.groupby("strategy")[TIME].mean().sort_values(kind="stable", na_position="last")
        rows += [_row(job, name, group[group["strategy"] == name], base) for name in means.index]
    return pd.DataFrame(rows)


def _row(job: Mapping[str, Any], strategy: str, runs: pd.DataFrame, base: pd.DataFrame) -> dict[str, Any]:
    times = _times(runs)
    seconds = str(runs["status"].iloc[0])
    if not times.empty:
        interval = mean_interval(times.tolist())
        margin = f" ± {(interval.high - interval.low) / 2:.3f}" if len(times) > 1 else ""
        failed = f", {len(runs) - len(times)} failed" if len(times) < len(runs) else ""
        seconds = f"{interval.mean:.3f}{margin}{failed}"
    pairs = pd.concat([_times(base), times], axis=1, join="inner")
    gain = ratio_interval(pairs.iloc[:, 0].tolist(), pairs.iloc[:, 1].tolist()) if len(pairs) else None
    degrees = [(name, job[f"layout_{name}"]) for name in DEGREES]
    stated = [f"{name.upper()} {value}" for name, value in degrees if pd.notna(value) and (name, value) != ("cp", 1)]
    size = job["microbatch_size"]
    idle = runs["bubble_ratio"].mean()
    memory = runs["peak_memory_bytes"].max() / 2**30
    return {
        "workload": str(job["workload"]),
        "model": str(job["model"]),
        "cluster": str(job["cluster"]),
        "degrees": ", ".join(stated) or "planner's choice",
        "strategy": strategy,
        "batch / microbatch": f"{job['global_batch']} / {'any' if pd.isna(size) else size}",
        "seconds per iteration": seconds,
        "speedup over Megatron": speedup(gain),
        "idle": NOTHING if pd.isna(idle) else f"{100 * idle:.0f}%",
        "memory, GiB": NOTHING if pd.isna(memory) else f"{memory:.1f}",
        "seeds": len(runs),
        "command": command(job, strategy, sorted(runs["seed"])),
    }


def _times(runs: pd.DataFrame) -> pd.Series[float]:
    return runs[runs["status"] == "ok"].set_index("seed")[TIME].astype(float)


def command(job: Mapping[str, Any], strategy: str, seeds: Sequence[int]) -> str:
    """The command of a row's runs; keys with their default are left out."""
    defaults = {key.name: key.default for key in documented_keys()}
    values = {JOB[name]: "null" if pd.isna(value) else str(value) for name, value in job.items()}
    changed = [f"{key}={value}" for key, value in values.items() if defaults.get(key) != value]
    words = ["--multirun"] if len(seeds) > 1 else []
    seed = (
        f"seed=range({len(seeds)})" if words and seeds == [*range(len(seeds))] else f"seed={','.join(map(str, seeds))}"
    )
    return shlex.join(["entrain-bench", *words, f"strategy={strategy}", *changed, seed])


def plain_runs(table: pd.DataFrame) -> pd.DataFrame:
    """The simulated runs of which strategy, data and settings are unchanged but for the keys of ``JOB``."""
    runs = table[
        (table["harness"] == "simulate") & (table["variant"] == "") & table["cluster"].isin(choices("cluster"))
    ]
    for name, value in _defaults().items():
        if name in runs:
            runs = runs[runs[name].isna() | (runs[name] == value) if not value else runs[name] == value]
    columns = ["strategy", "strategy_parameters", *PARTS]
    strategies = [(name, *_strategy(name)) for name in _known(runs, "strategy")]
    workloads = [(name, parameters_text(compose(f"workload={name}").workload)) for name in _known(runs, "workload")]
    runs = runs[pd.MultiIndex.from_frame(runs[columns]).isin(strategies)]
    return runs[pd.MultiIndex.from_frame(runs[["workload", "workload_parameters"]]).isin(workloads)]


def _known(runs: pd.DataFrame, group: str) -> list[str]:
    return sorted({*runs[group]} & {*choices(group)})


def _strategy(name: str) -> tuple[str, ...]:
    """Parameters and classes of the parts of a strategy."""
    strategy = compose(f"strategy={name}").strategy
    parts = (str(strategy[part]["_target_"]).rpartition(".")[2] for part in PARTS)
    return (parameters_text(strategy), *parts)


def _defaults() -> dict[str, Any]:
    """Defaults of the settings of a run that are not of its job, by their columns."""
    aside = {*JOB_KEYS, "seed", "strategy", "harness", "figure", "results_dir", "retry"}
    keys = [key for key in documented_keys() if key.name not in aside and not key.name.startswith("mlflow")]
    values = {key.name.removesuffix(".*").replace(".", "_"): yaml.safe_load(key.default) for key in keys}
    values["speed"] = setting_text({"any": 1.0})
    return {name: setting_text(value) if value is not None else None for name, value in values.items()}


def claims_page(judged: Iterable[JudgedClaim]) -> str:
    """The page of all claims with their verdicts."""
    judged = [*judged]
    shown = pd.DataFrame(map(_claim, judged))
    commands = [
        "\n".join(command for command, label in claim_commands(one.claim).items() if label in SETTINGS)
        for one in judged
    ]
    return (
        "# All claims\n\nClick a heading to sort. A claim's link leads to its settings, other choices and the "
        "assumption that decides; [claims](claims.md) explains the verdicts. Commands run both sides.\n\n"
        + html_table("claims", shown, commands, ["paper", "kind", "verdict", "verdict, fair"])
    )


def _claim(judged: JudgedClaim) -> dict[str, str]:
    claim = judged.claim
    row = claim_row(judged)
    anchor = (claim.group or claim.name).replace("_", "-").lower()
    cells = {
        "paper": claim.system,
        "kind": str(claim.kind),
        "claim": f"{claim.claim} ({claim.where})",
        "published": row["paper_value"],
        "here": row["published_value"],
        "verdict": row["published"],
        "fair": row["fair_value"],
        "verdict, fair": row["fair"],
    }
    shown = {heading: escape(text) for heading, text in cells.items()}
    return shown | {"claim": f'<a href="claims/{claim.file}.html#{anchor}">{shown["claim"]}</a>'}


def html_table(name: str, cells: pd.DataFrame, commands: Iterable[str], filters: Sequence[str]) -> str:
    """A table of HTML cells as a block of MyST: its anchor, a command for each row, columns of which readers choose."""
    # pandas would write a newline as a backslash and an n.
    lines = [escape(text).replace("\n", "&#10;") for text in commands]
    shown = [f"<details><summary>show</summary><pre>{text}</pre></details>" for text in lines]
    with pd.option_context("display.max_colwidth", None):
        html = cells.assign(command=shown).to_html(index=False, escape=False, table_id=name, classes="interactive")
    return f"````{{raw}} html\n<div class='table-scroll' data-filters='{'|'.join(filters)}'>\n{html}\n</div>\n````\n"
