"""The cost of daily use: runs, sweeps and commands, in CPU seconds, which other work on the machine hardly changes."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time

from entrain_bench.config.tree import choices
from entrain_bench.lab.bench.measures import Measure, median_s, peak_rss_gb
from entrain_bench.lab.processes import last_line, run_python
from entrain_bench.records.records import Results
from entrain_bench.run.cells import attempt, compose_cells, run_cells
from entrain_bench.run.experiment import run_experiment

COMMAND_S = 280.0


def cells(job: Sequence[str] = ("workload=chartqa",), strategies: Sequence[str] = ()) -> Iterator[Measure]:
    """CPU seconds of one run of a job per strategy, configuration and record included; then their sum."""
    total_s = 0.0
    with TemporaryDirectory(prefix="entrain-bench-") as folder:
        for name in strategies or choices("strategy"):
            started = process_time()
            (cell,) = compose_cells([f"strategy={name}", *job])
            done = attempt(cell, Results(Path(folder)))
            seconds = process_time() - started
            if done.record is None or done.record.status == "failed":
                raise RuntimeError(f"{name}: {done.problem or (done.record and done.record.reason)}")
            total_s += seconds
            yield name, {"cpu_s": seconds}
    yield "all", {"cpu_s": total_s}


def sweep_of_jobs(jobs: Sequence[Sequence[str]], strategies: Sequence[str] = ()) -> Iterator[Measure]:
    """CPU seconds of the runs of all strategies on several jobs in one process, where the runs of a job share work."""
    names = strategies or choices("strategy")
    with TemporaryDirectory(prefix="entrain-bench-") as folder:
        started = process_time()
        sweeps = [compose_cells([f"strategy={','.join(names)}", *job], multirun=True) for job in jobs]
        spent_s = {"compose": process_time() - started} | dict.fromkeys(names, 0.0)
        plain = [replace(cell, timeline=False) for swept in sweeps for cell in swept]
        for done in run_cells(plain, Results(Path(folder))):
            if done.record is None or done.record.status == "failed":
                raise RuntimeError(
                    f"{' '.join(done.cell.overrides)}: {done.problem or (done.record and done.record.reason)}"
                )
            now = process_time() - started
            spent_s[done.cell.overrides[0].partition("=")[2]] += now - sum(spent_s.values())
    yield from ((name, {"cpu_s": seconds}) for name, seconds in spent_s.items())
    yield "all", {"cpu_s": sum(spent_s.values())}


def sweep(num_cells: int, overrides: Sequence[str]) -> Iterator[Measure]:
    """Cost of a run in a sweep beyond its experiment in CPU seconds, and growth of the peak memory over the sweep."""
    composed = compose_cells([*overrides, f"seed=range({num_cells})"], multirun=True)
    experiment_s = median_s(lambda: run_experiment(composed[0].config), timer=process_time)
    with TemporaryDirectory(prefix="entrain-bench-") as folder:
        done = run_cells(composed, Results(Path(folder)))
        first = [next(done) for _ in range(num_cells // 5)]
        held_gb, started = peak_rss_gb(), process_time()
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
    log, before = folder / "log", _children_s()
    environment = {"XDG_CACHE_HOME": str(folder / "cache")}
    if problem := run_python(["-m", "entrain_bench.cli", *arguments], log, COMMAND_S, environment):
        raise RuntimeError(f"{' '.join(arguments)}: {problem} ({last_line(log)})")
    return {"cpu_s": _children_s() - before}


def _children_s() -> float:
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
