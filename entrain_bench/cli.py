"""The ``entrain-bench`` command: what it can do, and how errors end it."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from entrain_bench.base.errors import TRACEBACK_VARIABLE, ExecutionError, UserError, explain, is_unwritable

EXIT_FAILED, EXIT_USER_ERROR, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 1, 2, 130, 141
# A first word of these is a command; anything else is a run or a sweep. Modules are imported when they are wanted.
COMMANDS = (
    "calibrate",
    "check",
    "claims",
    "figure",
    "figures",
    "profile",
    "recommend",
    "reference",
    "report",
    "trace",
    "ui",
    "verify",
)


def main() -> None:
    """Console entry point; exits with 0, 1 (a run failed), 2 (bad input), 130 (interrupted) or 141 (nobody reads)."""
    code = run_command(sys.argv[1:])
    if code == EXIT_BROKEN_PIPE:
        # What is still to be written would be tried again at the end of Python.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def run_command(arguments: Sequence[str]) -> int:
    """Do what the command line says; returns its exit code."""
    name, rest = (arguments[0], arguments[1:]) if arguments and arguments[0] in COMMANDS else ("run", arguments)
    try:
        command = importlib.import_module(f"entrain_bench.commands.{name}")
        try:
            code: int = command.main(rest)
        finally:
            sys.stdout.flush()
        return code
    except UserError as error:
        _show_error(error, str(error))
        return EXIT_USER_ERROR
    except ExecutionError as error:
        _show_error(error, str(error))
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted; what was finished is kept", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_BROKEN_PIPE
    except Exception as error:
        if is_unwritable(error):
            _show_error(error, explain(error))
            return EXIT_USER_ERROR
        _show_error(error, f"{explain(error)} (set {TRACEBACK_VARIABLE}=1 for more)")
        return EXIT_FAILED


def _show_error(error: Exception, line: str) -> None:
    if os.environ.get(TRACEBACK_VARIABLE):
        traceback.print_exception(error)
    print(f"entrain-bench: {' '.join(line.split())}", file=sys.stderr)


if __name__ == "__main__":
    main()
