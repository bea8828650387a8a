"""Tries random command lines, traces and sweeps; names what ends in a traceback, an error of ours, or too late."""

from __future__ import annotations

import argparse
import shlex
from tempfile import TemporaryDirectory

import numpy as np

from entrain_bench.run.parallel import Died, run_parallel

from .draw import command_line, trace
from .trial import Case, in_limits

TRACES_PER_LINE, SWEEPS_PER_LINE = 0.25, 0.1


def main() -> int:
    """Try what is drawn; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="what is drawn (default: 0)")
    parser.add_argument(
        "--count", type=int, default=2000, help="command lines; also a quarter as many traces, a tenth as many sweeps"
    )
    options = parser.parse_args()
    with TemporaryDirectory(prefix="fuzz-") as folder:
        problems, longest_s, longest = 0, 0.0, ""
        numbers = (int(options.count * share) for share in (1, TRACES_PER_LINE, SWEEPS_PER_LINE))
        all_cases = cases(options.seed, *numbers, folder)
        for number, (case, found) in enumerate(run_parallel(in_limits, all_cases, 1), start=1):
            problem, seconds = (str(found), 0.0) if isinstance(found, Died) else found
            what = _name(case, number - options.count)
            if seconds > longest_s:
                longest_s, longest = seconds, what
            if problem:
                problems += 1
                print(f"{what}\n    {problem[:300]}", flush=True)
            if number % 100 == 0:
                print(f"{number} of {len(all_cases)} tried, {problems} with a problem", flush=True)
    print(f"{len(all_cases)} tried, {problems} with a problem; the longest took {longest_s:.1f} s: {longest}")
    return 1 if problems else 0


def _name(case: Case, number: int) -> str:
    """The name of a case; ``number`` is its place behind the command lines."""
    return shlex.join(case.words) or (f"trace {number}" if case.sweep is None else f"sweep {case.sweep}")


def cases(seed: int, num_lines: int, num_traces: int, num_sweeps: int, folder: str) -> list[Case]:
    """All cases; the same for the same seed."""
    lines = [Case(folder, command_line(np.random.default_rng([seed, 0, i]))) for i in range(num_lines)]
    traces = [Case(folder, trace=trace(np.random.default_rng([seed, 1, i]))) for i in range(num_traces)]
    return [*lines, *traces, *(Case(folder, sweep=seed + number) for number in range(num_sweeps))]


if __name__ == "__main__":
    raise SystemExit(main())
