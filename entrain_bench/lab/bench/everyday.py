"""What people wait for day by day: figures, with and without anything to do, and sweeps of many cells."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from math import isnan, nan
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from entrain_bench.lab.bench.measures import median_s
from entrain_bench.records.records import Results
from entrain_bench.run.cells import compose_cells, run_cells
from entrain_bench.run.experiment import run_experiment

FIRST_CELL = "[1/"


def figures(names: Sequence[str] = ()) -> dict[str, float]:
    """Seconds that the command takes from nothing (no run, nothing composed yet), and with nothing left to do."""
    with TemporaryDirectory(prefix="entrain-bench-") as folder:
        arguments = ["figures", *names, f"results_dir={folder}"]
        from_nothing_s, _ = _command(arguments, Path(folder))
        return {"from_nothing_s": from_nothing_s, "nothing_to_do_s": _command(arguments, Path(folder))[0]}


def sweep(num_cells: int, overrides: Sequence[str]) -> dict[str, float]:
    """A sweep of many small cells in one process: its first result, and what a cell costs beyond its experiment."""
    (cell,) = compose_cells(overrides)
    experiment_s = median_s(lambda: run_experiment(cell.config))
    with TemporaryDirectory(prefix="entrain-bench-") as folder:
        arguments = ["--multirun", *overrides, f"seed=range({num_cells})", f"results_dir={folder}/results"]
        total_s, first_s = _command(arguments, Path(folder))
    return {
        "first_result_s": first_s,
        "total_s": total_s,
        "experiment_s": experiment_s,
        "overhead_s": (total_s - first_s) / (num_cells - 1) - experiment_s,
    }


def memory(num_cells: int, overrides: Sequence[str]) -> dict[str, float]:
    """The most memory this process has held after a fifth of many cells and after all of them."""
    cells = compose_cells([*overrides, f"seed=range({num_cells})"], multirun=True)
    held = []
    with TemporaryDirectory(prefix="entrain-bench-") as folder:
        for number, _ in enumerate(run_cells(cells, Results(Path(folder))), start=1):
            if number in (num_cells // 5, num_cells):
                held.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6)
    return {"after_a_fifth_mb": held[0], "after_all_mb": held[1], "growth": held[1] / held[0] - 1.0}


def _command(arguments: Sequence[str], folder: Path) -> tuple[float, float]:
    """Seconds until the command has ended, and until it has named the first cell."""
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    started, first_s = perf_counter(), nan
    with subprocess.Popen(
        [sys.executable, "-m", "entrain_bench.cli", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
    ) as process:
        assert process.stderr
        for line in process.stderr:
            if line.startswith(FIRST_CELL) and isnan(first_s):
                first_s = perf_counter() - started
    if process.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {process.returncode}")
    return perf_counter() - started, first_s
