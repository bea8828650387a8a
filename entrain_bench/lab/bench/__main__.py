"""Runs the cases, each in a process of its own, and writes ``results/bench.json``."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from entrain_bench.answers.console_table import make_console
from entrain_bench.base.errors import unknown_choice
from entrain_bench.base.files import write_atomically
from entrain_bench.base.hosttime import processor_name
from entrain_bench.lab.bench.cases import CASES

# The figures from nothing, on a slow machine.
CASE_TIMEOUT_S = 3600


def main(arguments: Sequence[str]) -> int:
    """Run all cases, or with ``--case NAME`` one in this process."""
    if arguments:
        if arguments[0] != "--case" or len(arguments) != 2 or arguments[1] not in CASES:
            print(unknown_choice("bench --case", arguments[-1], CASES), file=sys.stderr)
            return 2
        print(json.dumps(CASES[arguments[1]][1]()))
        return 0
    console, results, failed = make_console(), {}, list[str]()
    table = Table("case", "measured", "target")
    for name, (target, _) in CASES.items():
        try:
            with console.status(name):
                measured = measure_apart(name)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            failed.append(f"{name}: {error}")
            continue
        results[name] = {"target": target, **measured}
        table.add_row(name, "  ".join(f"{key}={value:.4g}" for key, value in measured.items()), target)
    console.print(table)
    machine = {"processor": processor_name(), "cores": os.cpu_count(), "python": platform.python_version()}
    path = Path("results") / "bench.json"
    write_atomically(path, json.dumps({"machine": machine, "cases": results}, indent=1).encode())
    print(f"written to {path}")
    for line in failed:
        print(line, file=sys.stderr)
    return 1 if failed else 0


def measure_apart(name: str) -> dict[str, float]:
    """The numbers of a case measured by a process of its own, which the others have neither warmed nor filled."""
    done = subprocess.run(
        [sys.executable, "-m", "entrain_bench.lab.bench", "--case", name],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        timeout=CASE_TIMEOUT_S,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
