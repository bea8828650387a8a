"""``make fidelity``: trains and predicts the cases that are not done yet; writes ``results/fidelity.csv`` and a figure.

Ranks are pinned, one thread each. Where there are more ranks than cores they share them, and the prediction shares them
alike (``shared``).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

import pandas as pd

from entrain_bench.answers.console_table import make_console
from entrain_bench.answers.fidelity import pair_rows, rank_correlations, summary
from entrain_bench.base.errors import UserError
from entrain_bench.base.files import write_atomically
from entrain_bench.figures._runner import render
from entrain_bench.figures._sidecar import described
from entrain_bench.lab.bench.ranks import on_ranks
from entrain_bench.lab.fidelity import figure
from entrain_bench.lab.fidelity.cases import NUM_RANKS, Case, all_cases
from entrain_bench.lab.fidelity.compare import TARGET_ITERATION, TARGET_SPEEDUP, case_rows
from entrain_bench.lab.fidelity.predict import predict_group, simulated
from entrain_bench.lab.fidelity.ranks import link_times, train_cases

REPEATS = 7
COMMAND = "make fidelity"
# Where the seconds of each kind of prediction come from.
COSTS = {"emulated": "measured", "simulated": "profiled"}
# Memory goes back to the allocator and not to the system, whose pages would cost a pass as much as its products.
KEPT_HEAP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
TARGETS = {"iteration_error": TARGET_ITERATION, "speedup_error": TARGET_SPEEDUP, "sure_sign_errors": 0.0}


def main(arguments: Sequence[str]) -> int:
    """Measure what is missing, compare, and say which targets are missed (exit code 1)."""
    parser = argparse.ArgumentParser(prog="python -m entrain_bench.lab.fidelity", description=__doc__)
    parser.add_argument("--results-dir", type=Path, default=Path("results"), help="where files go")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="measured iterations of each program")
    parser.add_argument(
        "--truth",
        nargs="+",
        default=(),
        metavar="OVERRIDE",
        help="also simulate under this cost truth: cluster/device=profiled cluster.device.path=FILE",
    )
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"--repeats={options.repeats}: must be at least 1")
    folder, cores = options.results_dir / "fidelity", _cores()
    os.environ |= KEPT_HEAP
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"load average {load:.1f}: numbers of a machine that does other work", file=sys.stderr)
    print("making the programs", flush=True)
    cases = list(all_cases())
    measure(cases, options.repeats, folder, cores)
    links = json.loads((folder / "links.json").read_text())
    simulate = partial(simulated, truth=options.truth, links=links, cores=cores) if options.truth else None
    try:
        rows = case_rows(cases, folder, simulate)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return report(rows, options.results_dir, load)


def measure(cases: Sequence[Case], repeats: int, folder: Path, cores: Sequence[int]) -> None:
    """Train and predict the cases whose files are not there; each leaves its file as soon as its group is done."""
    links = folder / "links.json"
    if not links.exists():
        (rank, _) = on_ranks(link_times, 2, cores=cores)
        write_atomically(links, json.dumps(rank).encode())
    done = 0
    # What else the machine does changes over minutes: predictions are measured right after what they predict.
    for (num_ranks, workload, seed), some in groupby(cases, key=lambda case: case.group):
        members = list(some)
        if untrained := [case for case in members if not (folder / f"{case.key}.json").exists()]:
            on_ranks(train_cases, num_ranks, untrained, repeats, folder, cores=cores)
        unpredicted = [case for case in members if not (folder / f"{case.key}.emulated.json").exists()]
        predict_group(unpredicted, json.loads(links.read_text()), cores, folder)
        done += len(members)
        print(f"{done}/{len(cases)} programs: {num_ranks} ranks, workload {workload}, seed {seed}", flush=True)


def report(rows: pd.DataFrame, results: Path, load: float) -> int:
    """Write the table and the figure; print errors beside their targets, and the worst cases.

    The figure and the verdict are those of the simulated predictions where there are any.
    """
    write_atomically(results / "fidelity.csv", rows.assign(load_average=load).to_csv(index=False).encode())
    missed: list[str] = []
    for prediction, own in rows.groupby("prediction", sort=False):
        missed = _report_one(str(prediction), own, results)
    if missed:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


def _report_one(prediction: str, rows: pd.DataFrame, results: Path) -> list[str]:
    """Draw and print one kind of prediction; returns the targets that it misses."""
    pairs = pair_rows(rows)
    files = render(lambda: figure.draw(rows, pairs)) | {"json": _sidecar(prediction, rows)}
    for suffix, content in files.items():
        write_atomically(results / "figures" / f"fidelity.{suffix}", content)
    values = summary(rows, pairs)
    console = make_console()
    console.print(f"{prediction}:")
    for name, value in values.items():
        target = f"  (target: at most {TARGETS[name]:g})" if name in TARGETS else ""
        console.print(f"{name:18} {value:.4g}{target}", highlight=False)
    worst = rows.loc[rows["iteration_error"].abs().nlargest(figure.NUM_NAMED).index]
    columns = ["num_ranks", "workload", "seed", "strategy", "measured_s", "predicted_s", "noise", "action_bias"]
    console.print("worst cases:", worst[columns].round(3).to_string(index=False), sep="\n", highlight=False)
    by_ranks = {number: rank_correlations(rows[rows["num_ranks"] == number]).mean() for number in NUM_RANKS}
    console.print("Kendall tau by ranks:", {number: round(float(tau), 3) for number, tau in by_ranks.items()})
    return [name for name, target in TARGETS.items() if values[name] > target]


def _sidecar(prediction: str, rows: pd.DataFrame) -> bytes:
    title = (figure.__doc__ or "").partition("\n")[0]
    setting = {name: rows[name].unique().tolist() for name in ("num_ranks", "workload", "strategy")}
    seeds = sorted(rows["seed"].unique().tolist())
    return described(title, COMMAND, setting, seeds, {"ranks of this machine": COSTS[prediction]})


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
