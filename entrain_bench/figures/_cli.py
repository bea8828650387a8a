"""The command line of the figures; what it needs for ``--help`` is imported fast."""

from __future__ import annotations

import argparse
import ast
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path

import entrain_bench.figures as package
from entrain_bench.errors import UserError, unknown_choice

# Trains on ranks of this machine, which takes longer and cannot run everywhere: drawn only when named.
ON_REQUEST = frozenset({"measured_gantt"})
EXIT_USER_ERROR, EXIT_INTERRUPTED = 2, 130


def main(arguments: Sequence[str]) -> int:
    """Draw the named figures, or all that need no training.

    Returns:
        0; 1 if a cell failed or data is missing, 2 for bad input, 130 if interrupted.
    """
    choices = discover()
    parser = argparse.ArgumentParser(
        prog="python -m entrain_bench.figures",
        description="Run what is missing and draw figures to <results-dir>/figures/<name>.{pdf,png,csv}.",
        epilog="figures:\n" + "\n".join(f"  {name:22}{summary}" for name, summary in choices.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="name", help="figures to draw; default: all that need no training")
    parser.add_argument("--results-dir", default="results", help="where runs are and figures go (default: results)")
    options = parser.parse_args(arguments)
    try:
        for name in options.names:
            if name not in choices:
                raise unknown_choice("figure", name, choices)
        from entrain_bench.figures._runner import draw_figures

        unasked = [name for name in choices if name not in ON_REQUEST]
        return draw_figures(list(dict.fromkeys(options.names)) or unasked, options.results_dir)
    except UserError as error:
        print(f"figures: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("interrupted; finished runs and figures are kept", file=sys.stderr)
        return EXIT_INTERRUPTED


def discover() -> dict[str, str]:
    """Every figure and the first line of its docstring, without importing it."""
    found = {}
    for info in pkgutil.iter_modules(package.__path__):
        if not info.name.startswith("_"):
            source = (Path(package.__path__[0]) / f"{info.name}.py").read_text()
            found[info.name] = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    return found
