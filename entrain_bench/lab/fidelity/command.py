"""Train and predict programs; write ``results/fidelity.csv`` and a figure, and resume where an earlier call ended.

Every rank has a core of its own and one thread; programs with more ranks than cores are left out.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import pandas as pd

from entrain_bench.answers.console_table import make_console
from entrain_bench.base.errors import require
from entrain_bench.lab.fidelity.comparison import (
    TARGET_ITERATION,
    TARGET_SPEEDUP,
    TITLE,
    draw,
    pair_rows,
    rank_correlations,
    summary,
)
from entrain_bench.lab.fidelity.predict import all_rows, predict_group
from entrain_bench.lab.fidelity.programs import HALVES, NUM_RANKS, FidelityProgram, all_programs
from entrain_bench.lab.fidelity.ranks import train_programs
from entrain_bench.lab.measuring import allowed_cores, read_json, write_json, write_outputs
from entrain_bench.train.launching import on_ranks
from entrain_bench.train.profiling.timing import Patience, measure_collectives

# Repetitions in each half.
REPEATS = 4
COMMAND = "make fidelity"
# Programs that are printed, the worst.
NUM_NAMED = 3
# Memory goes back to the allocator and not to the system, whose pages would cost a pass as much as its products.
KEPT_HEAP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
TARGETS = {"iteration_error": TARGET_ITERATION, "speedup_error": TARGET_SPEEDUP, "sure_sign_errors": 0.0}
# A short and a long message: latency, and bandwidth from the difference.
MESSAGE_BYTES = (64, 1 << 20)
PATIENCE = Patience(50, 10.0)


def add_options(parser: ArgumentParser) -> None:
    """Add the options of the measurement."""
    parser.add_argument("--repeats", type=int, default=REPEATS, help="measured iterations before and after emulation")


def run(options: Namespace) -> int:
    """Measure what is missing, compare, and list missed targets (return 1); ``UserError`` for bad options."""
    require(options.repeats >= 1, "--repeats", options.repeats, "at least 1")
    cores = allowed_cores()
    folder = options.results_dir / "fidelity"
    load = os.getloadavg()[0]
    os.environ |= KEPT_HEAP
    if load > 0.5:
        print(f"load average {load:.1f}: other work on this machine disturbs the measurement", file=sys.stderr)
    require(len(cores) >= min(NUM_RANKS), "cores", len(cores), f"at least {min(NUM_RANKS)}")
    print("making the programs", flush=True)
    programs = [*all_programs(len(cores))]
    measure(programs, options.repeats, folder, cores)
    return report(all_rows(programs, folder), options.results_dir, load)


def measure(programs: Sequence[FidelityProgram], repeats: int, folder: Path, cores: Sequence[int]) -> None:
    """Train and predict programs without files; each leaves its files as soon as its group is done."""
    if (links := read_json(folder / "links.json")) is None:
        short, long = measure_collectives("cpu", 2, MESSAGE_BYTES, PATIENCE, ["send"], cores)
        (_, latency_s, _), (_, seconds, _) = short.seconds, long.seconds
        links = {"latency_s": latency_s, "bandwidth_bytes_per_s": long.num_bytes / max(seconds - latency_s, 1e-9)}
        write_json(folder / "links.json", links)
    done = 0
    for (num_ranks, workload, seed), some in groupby(programs, attrgetter("num_ranks", "workload", "seed")):
        members = [*some]
        for half in HALVES:
            if untrained := [one for one in members if not (folder / f"{one.key}.{half}.json").exists()]:
                on_ranks(train_programs, num_ranks, untrained, half, repeats, folder, cores=cores)
            unpredicted = [one for one in members if not (folder / f"{one.key}.emulated.json").exists()]
            predict_group(unpredicted, links, cores, folder)
        done += len(members)
        print(f"{done}/{len(programs)} programs: {num_ranks} ranks, workload {workload}, seed {seed}", flush=True)


def report(rows: pd.DataFrame, results: Path, load: float) -> int:
    """Write the table and the figure; print errors with their targets, and the worst programs. Return 1 if missed."""
    console = make_console()
    pairs = pair_rows(rows)
    setting = {name: rows[name].unique().tolist() for name in ("num_ranks", "workload", "strategy")}
    seeds = sorted(rows["seed"].unique().tolist())
    drawn = partial(draw, rows, pairs)
    table = rows.assign(load_average=load)
    write_outputs(results, table, "fidelity", TITLE, drawn, COMMAND, setting, seeds, "measured")
    values = summary(rows, pairs)
    for name, value in values.items():
        target = f"  (target: at most {TARGETS[name]:g})" if name in TARGETS else ""
        console.print(f"{name:18} {value:.4g}{target}", highlight=False)
    worst = rows.loc[rows["iteration_error"].abs().nlargest(NUM_NAMED).index]
    columns = ["num_ranks", "workload", "seed", "strategy", "measured_s", "predicted_s", "noise", "action_bias"]
    console.print("worst programs:", worst[columns].round(3).to_string(index=False), sep="\n", highlight=False)
    by_ranks = {number: rank_correlations(of_number).mean() for number, of_number in rows.groupby("num_ranks")}
    console.print("Kendall tau by ranks:", {number: round(float(tau), 3) for number, tau in by_ranks.items()})
    missed = [name for name, target in TARGETS.items() if values[name] > target]
    if missed:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0
