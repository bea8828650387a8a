"""``make bench``: measure the suite itself; prints every measure as soon as it is known, writes ``results/bench.json``.

Every case runs in a process of its own, so that no case finds caches filled by another.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from entrain_bench.base.errors import unknown_choice
from entrain_bench.lab.bench.cases import CASES, measure_apart
from entrain_bench.lab.files import write_json
from entrain_bench.lab.machine import host_facts


def main(arguments: Sequence[str]) -> int:
    """Measure the named cases; exit code 1 if one fails, 2 for an unknown name."""
    parser = argparse.ArgumentParser(prog="python -m entrain_bench.lab.bench", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"cases to measure (default: all): {', '.join(CASES)}")
    parser.add_argument("--results-dir", type=Path, default=Path("results"), help="folder of bench.json")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.cases if name not in CASES]:
        print(unknown_choice("bench CASE", unknown[0], CASES), file=sys.stderr)
        return 2
    names = options.cases or [*CASES]
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    results = dict[str, dict[str, object]]()
    failed = False
    for number, name in enumerate(names, start=1):
        print(f"[{number}/{len(names)}] {name}: {CASES[name].target}", flush=True)
        measured = dict[str, dict[str, float]]()
        try:
            for label, values in measure_apart(name):
                measured[label] = values
                print(f"  {label:24} {'  '.join(f'{key}={value:.4g}' for key, value in values.items())}", flush=True)
        except RuntimeError as error:
            failed = True
            print(f"{name}: failed: {error}", file=sys.stderr, flush=True)
            continue
        results[name] = {"target": CASES[name].target, "measures": measured}
    path = options.results_dir / "bench.json"
    write_json(path, {"machine": host_facts(), "cases": results})
    print(f"written to {path}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
