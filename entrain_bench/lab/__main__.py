"""``python -m entrain_bench.lab PROGRAM [OPTIONS]``: measure the suite itself, or training, on this machine.

Each program's module documents it, adds its options and runs: ``add_options(parser)`` and ``run(options)``.
"""

from __future__ import annotations

import signal
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from entrain_bench.base.errors import ExecutionError, UserError, unknown_choice

PROGRAMS = ("bench", "fidelity", "gpu-check")


def main(arguments: Sequence[str]) -> int:
    """Run a program; exit code 1 if a check failed, 2 for bad options (one line), 130 if interrupted."""
    name, *rest = arguments or [""]
    if name not in PROGRAMS:
        print(f"entrain_bench.lab: {unknown_choice('program', name, PROGRAMS)}", file=sys.stderr)
        return 2
    # Packages of other programs would count in the measured memory.
    module = import_module(f"entrain_bench.lab.{name.replace('-', '_')}")
    parser = ArgumentParser(f"python -m entrain_bench.lab {name}", description=module.__doc__, allow_abbrev=False)
    parser.add_argument("--results-dir", type=Path, default=Path("results"), help="where files go (default: results)")
    module.add_options(parser)
    options = parser.parse_args(rest)
    try:
        return int(module.run(options))
    except (UserError, ExecutionError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted; finished parts are kept in {options.results_dir}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    # An exception, so that the current subprocess is ended, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
