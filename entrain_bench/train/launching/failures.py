"""What ends a rank: left in a folder by the rank, turned into one line by the process that started it."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from entrain_bench.base.errors import DeadlockError, ExecutionError, IncompatibleError, OutOfMemoryError, UserError
from entrain_bench.base.files import write_atomically

# A crash prints a stack of every thread, and the names of all extension modules.
OUTPUT_CHARS = 20_000
# Between two signs of life of a rank.
BEAT_S = 1.0
# A rank that others waited for in vain has shown none for this part of the time they waited.
SILENT_PART = 0.5
# What others say of it.
_WAITED = re.compile(r"waited longer than harness\.\w+=([0-9.e+]+)")
# Errors that say everything in their line; others are of the rank they happened on.
_KNOWN = {
    kind.__name__: kind for kind in (UserError, IncompatibleError, DeadlockError, OutOfMemoryError, ExecutionError)
}


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that ended a rank.

    ``time_s`` is since the epoch; ``kind`` is empty if the exception's class was none of this package's.
    """

    rank: int
    time_s: float
    kind: str
    text: str
    trace: str

    def as_error(self) -> Exception:
        """The exception for whoever started the ranks."""
        error = _KNOWN[self.kind](self.text) if self.kind else ExecutionError(f"rank {self.rank}: {self.text}")
        error.__cause__ = ExecutionError(f"traceback of rank {self.rank}:\n{self.trace}")
        return error


def write_failure(work: Path, rank: int, error: Exception) -> None:
    """Leave the exception that ends this rank."""
    kind = type(error).__name__ if type(error) in _KNOWN.values() else ""
    line = " ".join(str(error).split())
    text = line if kind else f"{type(error).__name__}: {line}"
    values = {"rank": rank, "time_s": time.time(), "kind": kind, "text": text, "trace": traceback.format_exc()}
    write_atomically(work / f"failure{rank}.json", json.dumps(values).encode())


def read_failures(work: Path) -> list[Failure]:
    """What ranks left before they ended, in the order of time."""
    failures = [Failure(**json.loads(path.read_text())) for path in work.glob("failure*.json")]
    return sorted(failures, key=lambda failure: failure.time_s)


def output_path(work: Path, number: int, kind: str = "rank") -> Path:
    """Where the standard output and error of a rank, or of another kind of process, go."""
    return work / f"output{'' if kind == 'rank' else f'-{kind}'}{number}.log"


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
    explained = {failure.rank for failure in failures}
    for rank, code in exit_codes.items():
        # Dead without a word: what the others say is that they lost it.
        if code and rank not in explained:
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
        return ExecutionError(f"rank {rank}: showed no sign of life for {silent_s:.0f} s (stopped, or hung); {cause}")
    return ExecutionError(cause)


def _how_it_ended(code: int, nccl_timeout_s: float | None) -> str:
    if code > 0:
        return f"exited with code {code}"
    if code == -signal.SIGABRT and nccl_timeout_s is not None:
        return f"aborted (SIGABRT); NCCL does so when it waited longer than harness.timeout_s={nccl_timeout_s:g}"
    return f"was killed by {signal.Signals(-code).name}"
