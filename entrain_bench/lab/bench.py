"""Measure the suite itself; print every measure at once, and write ``results/bench.json``.

Every case runs in a process of its own, with empty caches. Targets are printed; no test asserts a time.
"""

from __future__ import annotations

import os
import resource
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from timeit import repeat

from entrain_bench.base.errors import unknown_choice
from entrain_bench.config.tree import choices
from entrain_bench.lab.measuring import host_facts, write_json
from entrain_bench.records.records import Results
from entrain_bench.run.cells import compose_cells, run_cells
from entrain_bench.run.experiment import prepare, run_experiment
from entrain_bench.simulate import Simulator

# A measurement: its name, and values by name; units are part of the names.
type Measure = tuple[str, dict[str, float]]

# Repetitions of a call, and calls before that are not timed.
REPEATS = 10
WARM_UPS = 2


def median_s(call: Callable[[], object], repeats: int = REPEATS, timer: Callable[[], float] = perf_counter) -> float:
    """Median seconds of a repeated call, after warm-ups."""
    return median(repeat(call, timer=timer, number=1, repeat=WARM_UPS + repeats)[WARM_UPS:])


def peak_rss_gb() -> float:
    """Peak resident memory of this process, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def parts(strategies: Sequence[str], job: Sequence[str], repeats: int = REPEATS) -> Iterator[Measure]:
    """Seconds of planning (once) and of each part of an iteration (median), for each strategy on a job.

    The last value is the iteration time on the simulated clock, behind which assignment and schedule have to hide.
    """
    for name in strategies:
        setting = prepare(compose_cells([f"strategy={name}", *job])[0].config)
        strategy = setting.strategy
        started = perf_counter()
        layout = setting.plan()
        plan_s = perf_counter() - started
        profile = setting.profile.under(layout)
        size = setting.job.global_batch
        batches = [setting.source.batch(index, size, 0) for index in range(WARM_UPS + repeats)]
        assigned = strategy.assigner.assign(batches[0], layout, profile)
        program = strategy.scheduler.schedule(batches[0], layout, assigned, profile)
        simulator = Simulator(setting.truth, setting.job.memory_budget_bytes)
        stream = iter(batches)
        calls: dict[str, Callable[[], object]] = {
            "assign_s": lambda: strategy.assigner.assign(next(stream), layout, profile),  # noqa: B023
            "schedule_s": lambda: strategy.scheduler.schedule(batches[0], layout, assigned, profile),  # noqa: B023
            "execute_s": lambda: simulator.execute(program),  # noqa: B023
        }
        values = {"plan_s": plan_s, **{label: median_s(call, repeats) for label, call in calls.items()}}
        yield (
            name,
            values
            | {
                "iteration_time_s": simulator.execute(program).iteration_time_s,
                "num_actions": program.num_actions,
                "peak_rss_gb": peak_rss_gb(),
            },
        )


def sweep(num_cells: int, overrides: Sequence[str]) -> Iterator[Measure]:
    """Cost of a run in a sweep beyond its experiment in CPU seconds, and growth of the peak memory over the sweep."""
    composed = compose_cells([*overrides, f"seed=range({num_cells})"], multirun=True)
    experiment_s = median_s(lambda: run_experiment(composed[0].config), timer=process_time)
    with TemporaryDirectory(prefix="entrain-bench-") as folder:
        done = run_cells(composed, Results(Path(folder)))
        first = [next(done) for _ in range(num_cells // 5)]
        held_gb = peak_rss_gb()
        started = process_time()
        others = [*done]
    overhead_s = (process_time() - started) / len(others) - experiment_s
    yield "run", {"experiment_s": experiment_s, "overhead_s": overhead_s}
    growth = peak_rss_gb() / held_gb - 1.0
    yield f"memory_{len(first) + len(others)}_runs", {"peak_rss_gb": peak_rss_gb(), "growth": growth}


# 2,048 nodes of 8 H100 GPUs: 1,024 replicas; 131,072 samples.
WIDE = (
    "cluster=h100x64",
    "cluster.num_nodes=2048",
    "model=qwen25vl_llama3_8b",
    "layout.tp=2",
    "layout.dp=1024",
    "workload=coco",
    "global_batch=131072",
)
# The cheapest run there is.
TINY = (
    "strategy=megatron",
    "model=tiny",
    "cluster=tiny",
    "global_batch=16",
    "microbatch_size=2",
    "layout.tp=1",
    "layout.dp=2",
    "iterations=1",
)
# Measures that one process makes one by one, and the values to reach in words.
CASES: dict[str, tuple[str, Callable[[], Iterator[Measure]]]] = {
    "sweep": ("overhead_s <= 0.020, memory growth <= 0.02", partial(sweep, 100, TINY)),
    "parts_64_gpus": ("assign_s <= 0.020, schedule_s + execute_s <= 0.010", partial(parts, choices("strategy"), ())),
    "parts_16384_gpus": (
        "assign_s <= 0.5, schedule_s + execute_s <= 2, peak_rss_gb <= 4",
        partial(parts, ("megatron", "entrain"), WIDE, repeats=3),
    ),
}


def measure(name: str) -> dict[str, dict[str, float]]:
    """Measure a case and print every measure at once."""
    measured = dict[str, dict[str, float]]()
    for label, values in CASES[name][1]():
        measured[label] = values
        print(f"  {label:24} {'  '.join(f'{key}={value:.4g}' for key, value in values.items())}", flush=True)
    return measured


def add_options(parser: ArgumentParser) -> None:
    """Add the cases to measure."""
    names = ", ".join(CASES)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"cases to measure (default: all): {names}")


def run(options: Namespace) -> int:
    """Measure the named cases; return 1 if one fails. ``UserError`` for an unknown name."""
    if unknown := [name for name in options.cases if name not in CASES]:
        raise unknown_choice("CASE", unknown[0], CASES)
    names = options.cases or [*CASES]
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    results = dict[str, dict[str, object]]()
    failed = False
    for number, name in enumerate(names, start=1):
        target, _ = CASES[name]
        print(f"[{number}/{len(names)}] {name}: {target}", flush=True)
        try:
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                results[name] = {"target": target, "measures": pool.submit(measure, name).result()}
        except Exception as error:
            failed = True
            print(f"{name}: failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    path = options.results_dir / "bench.json"
    write_json(path, {"machine": host_facts(), "cases": results})
    print(f"written to {path}")
    return 1 if failed else 0
