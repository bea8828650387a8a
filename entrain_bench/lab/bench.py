"""Measure the suite itself; print every measure as soon as it is known, and write ``results/bench.json``.

Every case runs in a process of its own, so that no case finds caches filled by another. Targets stand next to the
measured values; no test asserts a time.
"""

from __future__ import annotations

import os
import resource
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

from entrain_bench.base.errors import unknown_choice
from entrain_bench.config.tree import choices
from entrain_bench.lab.measuring import (
    REPEATS,
    WARM_UPS,
    host_facts,
    last_line,
    peak_rss_gb,
    run_python,
    time_calls,
    write_json,
)
from entrain_bench.records.records import Results
from entrain_bench.run.cells import Done, compose_cells, run_cells
from entrain_bench.run.experiment import prepare, run_experiment
from entrain_bench.simulate import Simulator

# A measurement: its name, and values by name; units are part of the names.
type Measure = tuple[str, dict[str, float]]


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
        calls: dict[str, Callable[[int], Any]] = {
            "assign_s": lambda i: strategy.assigner.assign(batches[i], layout, profile),  # noqa: B023
            "schedule_s": lambda _: strategy.scheduler.schedule(batches[0], layout, assigned, profile),  # noqa: B023
            "execute_s": lambda _: simulator.execute(program),  # noqa: B023
        }
        yield (
            name,
            {
                "plan_s": plan_s,
                **{label: median(time_calls(call, repeats)) for label, call in calls.items()},
                "iteration_time_s": simulator.execute(program).iteration_time_s,
                "num_actions": program.num_actions,
                "peak_rss_gb": peak_rss_gb(),
            },
        )


COMMAND_S = 280.0


def _check(done: Done) -> None:
    if done.record is None or done.record.status == "failed":
        reason = done.record.reason if done.record else done.problem
        raise RuntimeError(f"{' '.join(done.cell.overrides)}: {reason}")


def sweep_of_jobs(jobs: Sequence[Sequence[str]], strategies: Sequence[str] = ()) -> Iterator[Measure]:
    """CPU seconds of the runs of all strategies on several jobs in one process, where the runs of a job share work."""
    names = strategies or choices("strategy")
    with TemporaryDirectory(prefix="entrain-bench-") as folder:
        started = process_time()
        sweeps = [compose_cells([f"strategy={','.join(names)}", *job], multirun=True) for job in jobs]
        spent_s = {"compose": process_time() - started} | dict.fromkeys(names, 0.0)
        plain = [replace(cell, timeline=False) for swept in sweeps for cell in swept]
        for done in run_cells(plain, Results(Path(folder))):
            _check(done)
            now = process_time() - started
            spent_s[done.cell.overrides[0].partition("=")[2]] += now - sum(spent_s.values())
    yield from ((name, {"cpu_s": seconds}) for name, seconds in spent_s.items())
    yield "all", {"cpu_s": sum(spent_s.values())}


def sweep(num_cells: int, overrides: Sequence[str]) -> Iterator[Measure]:
    """Cost of a run in a sweep beyond its experiment in CPU seconds, and growth of the peak memory over the sweep."""
    composed = compose_cells([*overrides, f"seed=range({num_cells})"], multirun=True)
    experiment_s = median(time_calls(lambda _: run_experiment(composed[0].config), timer=process_time))
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


def commands(overrides: Sequence[str]) -> Iterator[Measure]:
    """CPU seconds of commands, their worker processes included."""
    with TemporaryDirectory(prefix="entrain-bench-") as name:
        folder = Path(name)
        yield "help", _command(["--help"], folder)
        yield "one_run", _command([*overrides, f"results_dir={folder}/runs", "mlflow=false"], folder)
        quick = ["figures", "quick", f"results_dir={folder}/quick"]
        for label in ("quick_from_nothing", "quick_nothing_to_do"):
            yield label, _command(quick, folder)


def _command(arguments: Sequence[str], folder: Path) -> dict[str, float]:
    """CPU seconds of a command and of all its processes; ``RuntimeError`` if it fails."""
    log = folder / "log"
    before = _children_s()
    environment = {"XDG_CACHE_HOME": str(folder / "cache")}
    if problem := run_python(["-m", "entrain_bench.cli", *arguments], log, COMMAND_S, environment):
        raise RuntimeError(f"{' '.join(arguments)}: {problem} ({last_line(log)})")
    return {"cpu_s": _children_s() - before}


def _children_s() -> float:
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


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
# A small, a middle and a large model; runs of one job share its batches, bounds and layer times.
SHARED = (
    ("workload=opencqa_ocr", "model=qwen25vl_llama3_1b"),
    ("workload=coco", "model=qwen25vl_llama3_3b"),
    ("workload=chartqa", "model=qwen25vl_llama3_8b", "cluster=h100x64"),
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


@dataclass(frozen=True, slots=True)
class Case:
    """Measures that one process makes one by one, and the values to reach in words."""

    target: str
    measure: Callable[[], Iterator[Measure]]


CASES = {
    "shared_cells": Case("CPU seconds of all strategies on three jobs", partial(sweep_of_jobs, SHARED)),
    "sweep": Case("overhead_s <= 0.020, memory growth <= 0.02", partial(sweep, 100, TINY)),
    "commands": Case(
        "CPU seconds of a command; quick: from nothing <= 60, with nothing to do <= 6", partial(commands, TINY)
    ),
    "parts_64_gpus": Case(
        "assign_s <= 0.020, schedule_s + execute_s <= 0.010", partial(parts, choices("strategy"), ())
    ),
    "parts_16384_gpus": Case(
        "assign_s <= 0.5, schedule_s + execute_s <= 2, peak_rss_gb <= 4",
        partial(parts, ("megatron", "entrain"), WIDE, repeats=3),
    ),
}


def measure_apart(name: str) -> dict[str, dict[str, float]]:
    """Measure a case in a process of its own, which prints every measure as soon as it is known."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_measure, name).result()


def _measure(name: str) -> dict[str, dict[str, float]]:
    measured = dict[str, dict[str, float]]()
    for label, values in CASES[name].measure():
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
        print(f"[{number}/{len(names)}] {name}: {CASES[name].target}", flush=True)
        try:
            results[name] = {"target": CASES[name].target, "measures": measure_apart(name)}
        except Exception as error:
            failed = True
            print(f"{name}: failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    path = options.results_dir / "bench.json"
    write_json(path, {"machine": host_facts(), "cases": results})
    print(f"written to {path}")
    return 1 if failed else 0
