"""``make bench``: how fast the harness itself is. Medians after warm-up, each case in a process of its own.

Writes ``results/bench.json``. No test asserts a time; targets stand beside the measured values.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from rich.table import Table

from entrain_bench.compose import compose_cells
from entrain_bench.errors import unknown_choice
from entrain_bench.experiment import Setting, prepare
from entrain_bench.layout import Layout
from entrain_bench.program import Pass, Program
from entrain_bench.records import write_atomically
from entrain_bench.report import make_console
from entrain_bench.simulate import place_actions

REPEATS = 20
CASE_TIMEOUT_S = 600
# 2,048 nodes of 8 H100: DP 1024 x 16 stages, 64 microbatches of 4 a replica.
LARGE = (
    "cluster=h100x64",
    "cluster.num_nodes=2048",
    "model=qwen25vl_llama3_8b",
    "layout.tp=1",
    "layout.pp=16",
    "layout.dp=1024",
    "global_batch=262144",
)
# One long pipeline for the comparison with torch: 16 stages, 512 microbatches.
PIPELINE = (
    "strategy=megatron",
    "layout.tp=2",
    "cluster=a40x64",
    "cluster.num_nodes=8",
    "layout.dp=1",
    "global_batch=2048",
)


def median_s(call: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Median wall time of a call, after two calls to warm up."""
    times = []
    for index in range(repeats + 2):
        started = perf_counter()
        call()
        if index >= 2:
            times.append(perf_counter() - started)
    return median(times)


def _setting(overrides: Sequence[str]) -> tuple[Setting, Layout]:
    setting = prepare(compose_cells(overrides)[0].config)
    return setting, setting.strategy.plan(setting.profile)


def _program(setting: Setting, layout: Layout, iteration: int = 0) -> Program:
    shapes = setting.source.batch(iteration, setting.job.global_batch, 0)
    return setting.strategy.compose(shapes, layout, setting.profile)


def simulated_iteration(overrides: Sequence[str], repeats: int = REPEATS) -> dict[str, float]:
    """Schedule and execute (validate, price, place) one iteration, given its assignment."""
    setting, layout = _setting(overrides)
    shapes = setting.source.batch(0, setting.job.global_batch, 0)
    assignment = setting.strategy.assigner.assign(shapes, layout, setting.profile)

    def schedule() -> Program:
        return setting.strategy.scheduler.schedule(shapes, layout, assignment, setting.profile)

    program = schedule()
    scheduled = median_s(schedule, repeats)
    executed = median_s(lambda: setting.executor.execute(program), repeats)
    return {
        "schedule_s": scheduled,
        "execute_s": executed,
        "iteration_s": scheduled + executed,
        "num_actions": program.num_actions,
        "peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


def assignment(overrides: Sequence[str]) -> dict[str, float]:
    """The assigner alone, over different batches."""
    setting, layout = _setting(overrides)
    batches = iter([setting.source.batch(i, setting.job.global_batch, 0) for i in range(REPEATS + 2)])
    return {"assign_s": median_s(lambda: setting.strategy.assigner.assign(next(batches), layout, setting.profile))}


def against_torch(overrides: Sequence[str]) -> dict[str, float]:
    """Our placement and torch's private schedule simulator on one 1F1B; torch's sends and receives count as actions."""
    from torch.distributed.pipelining import schedules as torch_schedules

    setting, layout = _setting(overrides)
    program = _program(setting, layout)
    prices = setting.truth.price(program)
    ours = median_s(lambda: place_actions(program, prices.duration_s, prices.delay_s))
    kinds = {Pass.FORWARD: torch_schedules.F, Pass.BACKWARD: torch_schedules.FULL_BACKWARD}
    # torch knows no modules: its stage is our lane.
    orders = {
        lane: [
            torch_schedules._Action(lane, kinds[action.kind], action.microbatch)
            for action in program.lane(lane)
            if action.kind in kinds
        ]
        for lane in range(layout.num_lanes)
    }
    num_actions = sum(map(len, orders.values()))
    order = torch_schedules._add_send_recv(orders, lambda stage: stage, layout.num_lanes)
    theirs = median_s(
        lambda: torch_schedules._simulate_comms_compute(order, lambda stage: stage, layout.num_lanes), repeats=5
    )
    torch_actions = sum(map(len, order.values()))
    return {
        "num_actions": num_actions,
        "actions_per_s": num_actions / ours,
        "torch_actions_per_s": torch_actions / theirs,
        "ratio": (num_actions / ours) / (torch_actions / theirs),
    }


CASES: dict[str, tuple[str, Callable[[], dict[str, float]]]] = {
    "iteration_64_gpus_megatron": ("iteration_s <= 0.010", lambda: simulated_iteration(["strategy=megatron"])),
    "iteration_64_gpus_entrain": ("iteration_s <= 0.010", lambda: simulated_iteration(["strategy=entrain"])),
    "iteration_16384_gpus_megatron": (
        "iteration_s <= 2, peak_rss_gb <= 4",
        lambda: simulated_iteration(["strategy=megatron", *LARGE], repeats=5),
    ),
    "iteration_16384_gpus_entrain": (
        "iteration_s <= 2, peak_rss_gb <= 4",
        lambda: simulated_iteration(["strategy=entrain", *LARGE], repeats=5),
    ),
    "assignment_entrain_512": ("assign_s <= 0.020", lambda: assignment(["strategy=entrain"])),
    "assignment_entrain_4096": (
        "assign_s <= 0.200",
        lambda: assignment(["strategy=entrain", "global_batch=4096"]),
    ),
    "place_actions_against_torch": ("ratio >= 20", lambda: against_torch(PIPELINE)),
}


def main(arguments: Sequence[str]) -> int:
    """Run all cases, or with ``--case NAME`` one in this process."""
    if arguments:
        if arguments[0] != "--case" or len(arguments) != 2 or arguments[1] not in CASES:
            print(unknown_choice("bench --case", arguments[-1], CASES), file=sys.stderr)
            return 2
        print(json.dumps(CASES[arguments[1]][1]()))
        return 0
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    console, results = make_console(), {}
    table = Table("case", "measured", "target")
    for name, (target, _) in CASES.items():
        with console.status(name):
            done = subprocess.run(
                [sys.executable, "-m", "entrain_bench.bench", "--case", name],
                capture_output=True,
                text=True,
                env=environment,
                timeout=CASE_TIMEOUT_S,
            )
        if done.returncode:
            print(f"{name}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            return 1
        results[name] = {"target": target, **json.loads(done.stdout.splitlines()[-1])}
        measured = "  ".join(f"{k}={v:.4g}" for k, v in results[name].items() if k != "target")
        table.add_row(name, measured, target)
    console.print(table)
    machine = {"processor": _processor(), "cores": os.cpu_count(), "python": platform.python_version()}
    path = Path("results") / "bench.json"
    write_atomically(path, json.dumps({"machine": machine, "cases": results}, indent=1).encode())
    print(f"written to {path}")
    return 0


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
