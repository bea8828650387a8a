"""Output and failures of ranks: kept in a folder, and turned into one line by the process that started the ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from entrain_bench.base.errors import ExecutionError
from entrain_bench.base.files import write_atomically
from entrain_bench.run.parallel import end_with_parent
from entrain_bench.train.messages.failure import Failure

# A crash prints a stack of every thread, and the names of all extension modules.
OUTPUT_CHARS = 20_000
# Between two signs of life of a rank.
BEAT_S = 1.0
# A rank that others waited for in vain has shown none for this part of the time they waited.
SILENT_PART = 0.5
# What others say of it.
_WAITED = re.compile(r"waited longer than harness\.\w+=([0-9.e+]+)")


def write_failure(work: Path, rank: int, error: Exception) -> None:
    """Leave the exception that ends this rank."""
    write_atomically(work / f"failure{rank}.json", json.dumps(asdict(Failure.of(error, f"rank {rank}"))).encode())


def read_failures(work: Path) -> list[Failure]:
    """Return the failures that ranks recorded, in order of time."""
    failures = [Failure(**json.loads(path.read_text())) for path in work.glob("failure*.json")]
    return sorted(failures, key=lambda failure: failure.time_s)


def output_path(work: Path, number: int, kind: str = "rank") -> Path:
    """Where the standard output and error of a rank, or of another kind of process, go."""
    return work / f"output{'' if kind == 'rank' else f'-{kind}'}{number}.log"


def begin_process(environment: Mapping[str, str], output: Path | None) -> None:
    """Let this process, started for a run, end with the one that started it, and print to a file of the run, if any."""
    os.environ.update(environment)
    end_with_parent()
    if output is None:
        return
    try:
        with output.open("w") as file:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(file.fileno(), stream.fileno())
    except FileNotFoundError:
        # Interrupted while it started processes, that process is done with them.
        os._exit(1)


def read_output(work: Path, number: int, kind: str = "rank") -> str:
    """The end of what a rank, or another kind of process, has printed."""
    path = output_path(work, number, kind)
    return path.read_text(errors="replace")[-OUTPUT_CHARS:] if path.exists() else ""


def sign_of_life(work: Path, rank: int) -> Path:
    """The file whose time is that of a rank's last sign of life."""
    return work / f"alive{rank}"


def show_life(work: Path, rank: int) -> None:
    """Show every second, from a thread, that this process is neither stopped nor held up by something without end."""

    def beat() -> None:
        while True:
            try:
                os.utime(sign_of_life(work, rank))
            except FileNotFoundError:
                # Nobody wants to know any more.
                return
            time.sleep(BEAT_S)

    threading.Thread(target=beat, name="show-life", daemon=True).start()


def silent_rank(work: Path, ranks: Iterable[int], least_s: float) -> tuple[int, float] | None:
    """The rank of which nothing was heard for longest, and for how many seconds; None if all showed life lately."""
    now = time.time()
    since = {rank: now - sign_of_life(work, rank).stat().st_mtime for rank in ranks}
    rank = max(since, key=lambda one: since[one], default=None)
    return None if rank is None or since[rank] < max(least_s, 2 * BEAT_S) else (rank, since[rank])


def first_cause(
    work: Path,
    exit_codes: Mapping[int, int | None],
    timeout_s: float,
    *,
    uses_nccl: bool,
    producers: Mapping[int, int | None] | None = None,
) -> Exception:
    """The failure that came first; later ones only follow from it. Of a rank that others wait for in vain, its silence.

    Exit codes are by rank and by producer; that of a signal is negative, None is of one that still ran. ``timeout_s``
    is what a rank waits for another.
    """
    for producer, code in (producers or {}).items():
        # They leave nothing: what they fail to make they hand to the rank that wants it.
        if code:
            error = ExecutionError(f"producer {producer}: {_how_it_ended(code, None)}")
            error.__cause__ = ExecutionError(
                f"last output of producer {producer}:\n{read_output(work, producer, 'producer')}"
            )
            return error
    failures = read_failures(work)
    explained = {failure.who for failure in failures}
    for rank, code in exit_codes.items():
        # Dead without a word: what the others say is that they lost it.
        if code and f"rank {rank}" not in explained:
            aborted = uses_nccl and code == -signal.SIGABRT
            cause = f"rank {rank}: {_how_it_ended(code, timeout_s if uses_nccl else None)}"
            error = _after_silence(work, exit_codes, timeout_s, cause) if aborted else ExecutionError(cause)
            error.__cause__ = ExecutionError(f"last output of rank {rank}:\n{read_output(work, rank)}")
            return error
    first = failures[0].as_error()
    if waited := _WAITED.search(str(first)):
        error = _after_silence(work, exit_codes, float(waited[1]), str(first))
        error.__cause__ = first.__cause__
        return error
    return first


def _after_silence(work: Path, exit_codes: Mapping[int, int | None], waited_s: float, cause: str) -> ExecutionError:
    """The error of a rank that waited in vain, which names the one that it waited for where that is silent."""
    running = [rank for rank, code in exit_codes.items() if code is None]
    if silent := silent_rank(work, running, SILENT_PART * waited_s):
        rank, silent_s = silent
        return ExecutionError(f"rank {rank}: did not respond for {silent_s:.0f} s (stopped or hung); {cause}")
    return ExecutionError(cause)


def _how_it_ended(code: int, nccl_timeout_s: float | None) -> str:
    if code > 0:
        return f"exited with code {code}"
    if code == -signal.SIGABRT and nccl_timeout_s is not None:
        return f"aborted (SIGABRT); NCCL does so when it waited longer than harness.timeout_s={nccl_timeout_s:g}"
    return f"was killed by {signal.Signals(-code).name}"
