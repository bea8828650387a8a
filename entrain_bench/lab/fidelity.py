"""Train and emulate programs in turns; write ``results/fidelity.csv`` and a figure, and resume where a call ended.

Jobs with more ranks than cores are left out.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations, product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from scipy.stats import ttest_rel

from entrain_bench.answers.statistics import LEVEL, ratio_interval
from entrain_bench.base.errors import ExecutionError, require
from entrain_bench.figures import _style as style
from entrain_bench.figures._style import FAINT, GRID, INK
from entrain_bench.lab.measuring import allowed_cores, run_strategies, write_outputs
from entrain_bench.records.records import Record

STRATEGIES = ("megatron", "entrain", "disttrain", "dflop", "dip")
# A further group that splits weights and sequences, by strategy and degrees.
SPLIT = {"megatron_tp2_cp2": ("megatron", ("layout.tp=2", "layout.cp=2", "layout.dp=1"))}
# Targets of median errors.
TARGET_ITERATION = 0.10
TARGET_SPEEDUP = 0.05
TITLE = "Predicted against measured: iteration times, and speedups between strategies."
MISSED = "#d55e00"
GROUP = ["num_ranks", "workload", "seed"]
NUM_RANKS = (2, 4)
SEEDS = (0, 1)
PROGRAM_S = 600.0
# Actions of some 5 to 50 ms, so that neither calls from Python nor turns of the scheduler decide; no transfer blocks a
# rank, and no pass hides synchronization, as in training.
COMMON = (
    "cluster=hostx2",
    "model=tiny",
    "model.modules.vision.num_layers=4",
    "model.modules.vision.full_attention_layers=[1,3]",
    "model.modules.llm.num_layers=4",
    "workload=synthetic",
    "global_batch=16",
    "microbatch_size=2",
    "layout.tp=1",
    "overlap_grad_reduce=false",
    "overlap_param_gather=false",
    "p2p=overlapped",
    "iterations=4",
)
TRAIN = ("harness=train", "harness.device=cpu")
EMULATE = ("harness=emulate", "harness.device=cpu", "harness.dtype=float32", "harness.num_repetitions=2")
# Memory goes back to the allocator and not to the system, whose pages would cost a pass as much as its products.
ENVIRONMENT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "OMP_NUM_THREADS": "1"}
# Two ranks are a pipeline, or the two modules; of four, planners choose.
DEGREES = {2: "layout.dp=1", 4: "layout.dp=null"}
IMAGE = "workload.modalities.image"
WORKLOADS = {
    "even": ("workload.text.median=60", f"{IMAGE}.llm_tokens.median=60", f"{IMAGE}.llm_tokens.sigma=0.3"),
    "uneven": ("workload.text.median=40", f"{IMAGE}.llm_tokens.median=60", f"{IMAGE}.llm_tokens.sigma=1.0"),
    "text": ("workload.text.median=150", f"{IMAGE}.llm_tokens.median=60", f"{IMAGE}.probability=0.5"),
}
TARGETS = {"iteration_error": TARGET_ITERATION, "speedup_error": TARGET_SPEEDUP, "sure_sign_errors": 0.0}


def add_options(parser: ArgumentParser) -> None:
    """Add the options of the measurement."""
    parser.add_argument("--repeats", type=int, default=2, help="turns of training and emulating every program")


def run(options: Namespace) -> int:
    """Run missing measurements, compare, and list missed targets (return 1); ``UserError`` for bad options."""
    require(options.repeats >= 1, "--repeats", options.repeats, "at least 1")
    cores = allowed_cores()
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"load average {load:.1f}: other work on this machine disturbs the measurement", file=sys.stderr)
    require(len(cores) >= min(NUM_RANKS), "cores", len(cores), f"at least {min(NUM_RANKS)}")
    rows = list[dict[str, Any]]()
    for num_ranks, workload, seed in product(NUM_RANKS, WORKLOADS, SEEDS):
        if num_ranks <= len(cores):
            rows += measure(num_ranks, workload, seed, options.repeats, options.results_dir / "fidelity")
            print(f"{len(rows)} programs: {num_ranks} ranks, workload {workload}, seed {seed}", flush=True)
    return report(pd.DataFrame(rows), options.results_dir, load)


def programs_of(num_ranks: int, workload: str, seed: int) -> Iterator[tuple[str, str, list[str]]]:
    """The programs of a group: name, strategy and overrides."""
    job = [*COMMON, *WORKLOADS[workload], DEGREES[num_ranks], f"cluster.gpus_per_node={num_ranks}", f"seed={seed}"]
    for name in STRATEGIES:
        yield name, name, job
    if (num_ranks, seed) == (NUM_RANKS[-1], SEEDS[0]):
        for name, (strategy, degrees) in SPLIT.items():
            yield name, strategy, [*job, *degrees]


def measure(num_ranks: int, workload: str, seed: int, repeats: int, folder: Path) -> list[dict[str, Any]]:
    """A row for every program of a group, trained and emulated in turns. Columns: docs/fidelity.md.

    Programs run in turn, because a machine's speed changes over minutes. ``ExecutionError`` if one cannot be run.
    """
    programs = [*programs_of(num_ranks, workload, seed)]
    trained: dict[str, list[Record]] = {name: [] for name, *_ in programs}
    emulated: dict[str, list[Record]] = {name: [] for name, *_ in programs}
    for turn in range(repeats):
        for name, strategy, job in programs if turn % 2 else programs[::-1]:
            place = folder / str(turn) / f"{num_ranks}_{workload}_{seed}_{name}"
            for harness, records in (((*TRAIN, f"harness.num_ranks={num_ranks}"), trained), (EMULATE, emulated)):
                (record,) = run_strategies([strategy], [*job, *harness], place, PROGRAM_S, ENVIRONMENT).values()
                if record.status != "ok":
                    raise ExecutionError(f"{place.name}: {record.reason}")
                records[name].append(record)
    where = {"num_ranks": num_ranks, "workload": workload, "seed": seed}
    return [program_row(where | {"strategy": name}, trained[name], emulated[name]) for name in trained]


def report(rows: pd.DataFrame, results: Path, load: float) -> int:
    """Write the table and the figure; print errors with their targets. Return 1 if one is missed."""
    pairs = pair_rows(rows)
    setting = {name: rows[name].unique().tolist() for name in ("num_ranks", "workload", "strategy")}
    seeds = sorted(rows["seed"].unique().tolist())
    table = rows.assign(load_average=load)
    write_outputs(results, table, "fidelity", TITLE, partial(draw, rows, pairs), "make fidelity", setting, seeds)
    values = summary(rows, pairs)
    for name, value in values.items():
        print(f"{name:18} {value:.4g}", f" (target: at most {TARGETS[name]:g})" if name in TARGETS else "")
    missed = [name for name, target in TARGETS.items() if values[name] > target]
    if missed:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


def program_row(where: Mapping[str, Any], trained: Sequence[Record], predicted: Sequence[Record]) -> dict[str, Any]:
    """The columns of every comparison of a program's runs with their predictions; ``where`` comes first.

    The first iteration of each run, which warms up, is excluded.
    """
    measured_s, predicted_s = (
        [[row["iteration_time_s"] for row in record.iterations[1:]] for record in records]
        for records in (trained, predicted)
    )
    seconds = [float(took_s) for of_run in measured_s for took_s in of_run]
    row: dict[str, Any] = {
        "layout": "; ".join(f"{module} {text}" for module, text in trained[0].layout.items()),
        "measured_s": fmean(seconds),
        "predicted_s": fmean(map(fmean, predicted_s)),
        "repetitions_s": json.dumps([round(took_s, 5) for took_s in seconds]),
        "repeat_error": fmean(measured_s[-1]) / fmean(measured_s[0]) - 1.0,
        "measured_bubble": fmean(record.metrics["bubble_ratio"] for record in trained),
        "predicted_bubble": fmean(record.metrics["bubble_ratio"] for record in predicted),
    }
    return {**where, **row, "iteration_error": row["predicted_s"] / row["measured_s"] - 1.0}


def pair_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one row per pair of strategies of a group: the second's speedup, measured and predicted.

    The measured one has its 95% CI, ``low`` to ``high``, and a p-value for no speedup. ``sign_error``: the CI and the
    prediction are on different sides of 1.
    """
    pairs = []
    for group, members in rows.groupby(GROUP, sort=False):
        for one, other in combinations(members.to_dict("records"), 2):
            # Repetition by repetition, for strategies took turns.
            times = [json.loads(str(row["repetitions_s"])) for row in (one, other)]
            measured = ratio_interval(*times)
            predicted = one["predicted_s"] / other["predicted_s"]
            names = dict(zip(GROUP, group, strict=True)) | {"slow": one["strategy"], "fast": other["strategy"]}
            ends = {"measured_speedup": measured.mean, "low": measured.low, "high": measured.high}
            error = {"predicted_speedup": predicted, "error": predicted / measured.mean - 1.0}
            wrong = measured.excludes(1.0) and (measured.mean - 1.0) * (predicted - 1.0) < 0
            pairs.append({**names, **ends, "chance": ttest_rel(*np.log(times)).pvalue, **error, "sign_error": wrong})
    return pd.DataFrame(pairs)


def summary(rows: pd.DataFrame, pairs: pd.DataFrame) -> dict[str, float]:
    """Return the numbers with targets, and further numbers.

    Without any difference, the 95% CI of one pair in twenty excludes 1. ``sure_sign_errors`` counts only differences
    that are significant for all pairs together (Bonferroni).
    """
    groups = [of_group for _, of_group in rows.groupby(GROUP, sort=False)]
    taus = [of_group["measured_s"].corr(of_group["predicted_s"], method="kendall") for of_group in groups]
    return {
        "num_programs": float(len(rows)),
        "iteration_error": float(rows["iteration_error"].abs().median()),
        "repeat_error": float(rows["repeat_error"].abs().median()),
        "bubble_error": float((rows["predicted_bubble"] - rows["measured_bubble"]).abs().median()),
        "speedup_error": float(pairs["error"].abs().median()),
        "sign_errors": float(pairs["sign_error"].sum()),
        "sure_sign_errors": float((pairs["sign_error"] & (pairs["chance"] < LEVEL / len(pairs))).sum()),
        "num_pairs": float(len(pairs)),
        "kendall_tau": fmean(taus),
    }


def draw(rows: pd.DataFrame, pairs: pd.DataFrame) -> style.Picture:
    """Draw programs on the left and pairs of strategies on the right, one mark each."""
    # In the order in which other figures show them.
    colours = style.strategy_colours({name: place for place, name in enumerate((*STRATEGIES, *SPLIT))})
    figure, (times, gains) = style.panels(1, 2, style.DOUBLE_COLUMN_IN, 3.0)
    marks: Any = {"style": "num_ranks", "s": 14, "linewidth": 0}
    _diagonal(times, rows["measured_s"], rows["predicted_s"], TARGET_ITERATION)
    sns.scatterplot(rows, x="measured_s", y="predicted_s", hue="strategy", palette=colours, ax=times, **marks)
    style.legend_above(figure, times.get_legend_handles_labels()[0])
    times.legend().remove()
    _diagonal(gains, pairs["measured_speedup"], pairs["predicted_speedup"], TARGET_SPEEDUP)
    gains.axhline(1.0, color=FAINT, linewidth=0.6)
    gains.axvline(1.0, color=FAINT, linewidth=0.6)
    gains.hlines(pairs["predicted_speedup"], pairs["low"], pairs["high"], color=FAINT, linewidth=0.5)
    order: Any = {"hue": "sign_error", "palette": {False: INK, True: MISSED}, "legend": False}
    sns.scatterplot(pairs, x="measured_speedup", y="predicted_speedup", ax=gains, **order, **marks)
    times.set_title("Iteration time (s)")
    gains.set_title("Speedups between strategies")
    error = rows["iteration_error"].abs().median()
    message = (
        f"Predicted iteration times differ from measured ones by {error:.1%} in the median over {len(rows)} programs; "
        f"the order is wrong in {pairs['sign_error'].sum()} of {len(pairs)} pairs of strategies."
    )
    return style.Picture(figure, pairs, message)


def _diagonal(panel: Axes, one: pd.Series, other: pd.Series, target: float) -> None:
    low = min(one.min(), other.min())
    high = max(one.max(), other.max())
    ends = [low - 0.08 * (high - low), high + 0.08 * (high - low)]
    below, above = ([share * end for end in ends] for share in (1 - target, 1 + target))
    panel.fill_between(ends, below, above, color=GRID, alpha=0.5, lw=0)
    panel.plot(ends, ends, color=FAINT, linewidth=0.6)
    panel.set(xlim=ends, ylim=ends, xlabel="Measured", ylabel="Predicted")
