"""One command line or trace, tried."""

from __future__ import annotations

import io
import re
import resource
import signal
from collections.abc import Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from entrain_bench.base.errors import TRACEBACK_VARIABLE
from entrain_bench.cli import run_command
from support.sweeps import make_folder, sweep_problem

from .draw import SMALL

LIMIT_S = 60
# What breaks by itself: unforeseen, or in a library.
BROKEN = re.compile(rf"Traceback|internal error|{TRACEBACK_VARIABLE}|\.pyx?:\d+ in ")
MEMORY_BYTES = 12 * 2**30


@dataclass(frozen=True, slots=True)
class Case:
    """A trial in a folder: the words of a command line, the bytes of a trace, or the commands of a sweep."""

    folder: str
    words: tuple[str, ...] = ()
    trace: bytes | None = None
    sweep: int | None = None


def in_limits(case: Case) -> tuple[str, float]:
    """``try_case`` in a process of its own, which memory and time are taken from; and the seconds that it took."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    # Not caught: also a compiled loop ends.
    signal.alarm(LIMIT_S)
    started = perf_counter()
    problem = try_case(case)
    signal.alarm(0)
    return problem, perf_counter() - started


def try_case(case: Case) -> str:
    """The problem with how the command ended; empty if there is none."""
    folder, words = Path(case.folder), case.words
    if case.sweep is not None:
        with TemporaryDirectory(dir=folder) as here, chdir(here):
            make_folder(Path(here))
            return sweep_problem(case.sweep)
    if case.trace is not None:
        path = folder / "fuzz.parquet"
        path.write_bytes(case.trace)
        words = (*SMALL, "workload=trace", f"workload.path={path}")
    if words[0].partition("=")[0] in {text.partition("=")[0] for text in SMALL}:
        words = (*words, f"results_dir={folder / 'results'}", "mlflow=false")
    return _problem(words)


def _problem(words: Sequence[str]) -> str:
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code: object = run_command(words)
    except SystemExit as end:
        code = end.code or 0
    except BaseException as error:
        return f"raises {type(error).__name__}: {error}"
    said = err.getvalue()
    for line in said.splitlines():
        if BROKEN.search(line):
            return line
    if code not in (0, 1, 2):
        return f"exit code {code}"
    return _wrong_words(said) if code == 2 else ""


def _wrong_words(said: str) -> str:
    """The problem with the answer to bad input: more or less than one line of ours."""
    *before, last = said.splitlines() or [""]
    if not last.startswith("entrain-bench: "):
        return f"exit code 2 and no line of ours: {last}"
    return f"exit code 2 and {len(before) + 1} lines" if before else ""
