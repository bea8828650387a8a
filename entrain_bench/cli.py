"""The ``entrain-bench`` command: its verbs, and the handling of errors."""

import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from entrain_bench.base.errors import TRACEBACK_VARIABLE, ExecutionError, UserError, explain, is_unwritable
from entrain_bench.commands import SUMMARIES
from entrain_bench.config.line import CONFIG_DIR, HELP, RUN, VERSION, split, verb_of

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main() -> None:
    """Console entry point; exits with 0, 1 (a run failed), 2 (bad input), 130 (interrupted) or 141 (closed pipe)."""
    code = run_command(sys.argv[1:])
    if code == EXIT_INTERRUPTED:
        sys.stdout.flush()
        # At once: a thread that logs to MLflow would be waited for.
        os._exit(code)
    if code == EXIT_BROKEN_PIPE:
        # Python would try again at its end to write the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def run_command(arguments: Sequence[str]) -> int:
    """Run a command line; return its exit code."""
    try:
        try:
            return _dispatch(arguments)
        finally:
            sys.stdout.flush()
    except UserError as error:
        _show_error(error, str(error))
        return EXIT_USER_ERROR
    except ExecutionError as error:
        _show_error(error, str(error))
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted; finished parts are kept", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_BROKEN_PIPE
    except Exception as error:
        if is_unwritable(error):
            _show_error(error, explain(error))
            return EXIT_USER_ERROR
        _show_error(error, f"{explain(error)} (set {TRACEBACK_VARIABLE}=1 for more)")
        return EXIT_FAILED


def _dispatch(arguments: Sequence[str]) -> int:
    name, line = verb_of(split(arguments), SUMMARIES)
    if VERSION in line.options:
        print(_version())
        return 0
    if HELP in line.options:
        from entrain_bench.commands.help import help_text

        topic = line.options[HELP] or ("" if name == RUN else name)
        print(help_text(topic, line.options.get(CONFIG_DIR)))
        return 0
    from entrain_bench.config.grammar import read

    command = importlib.import_module(f"entrain_bench.commands.{name.replace('-', '_')}")
    code: int = command.main(read(line, name, command.VERB))
    return code


def _version() -> str:
    from importlib.metadata import version

    from entrain_bench.records.code import current_commit

    commit = current_commit()
    return f"entrain-bench {version('entrain-bench')}" + (f" (commit {commit})" if commit else "")


def _show_error(error: Exception, line: str) -> None:
    if os.environ.get(TRACEBACK_VARIABLE):
        traceback.print_exception(error)
    print(f"entrain-bench: {' '.join(line.split())}", file=sys.stderr)


if __name__ == "__main__":
    main()
