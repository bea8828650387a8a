"""One rank's life: started on this machine by ``launch``, or by torchrun."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from entrain_bench.base.errors import ExecutionError
from entrain_bench.base.files import write_atomically
from entrain_bench.config.schema import RunConfig
from entrain_bench.records.run_result import RunResult
from entrain_bench.run.parallel import end_with_parent
from entrain_bench.train.messages.control import Failure, named_wait
from entrain_bench.train.settings import TrainSettings

# Job of a rank; its argument reports a finished step.
type RankJob = Callable[[Callable[[int], None]], Any]
# A crash prints a stack of every thread, and the names of all extension modules.
OUTPUT_CHARS = 20_000
# Seconds between two signs of life of a rank.
BEAT_S = 1.0
# A rank counts as silent if it showed no sign of life for this share of the time that another waited.
SILENT_PART = 0.5


def run_rank(work: Path, rank: int, job: RankJob) -> Any:
    """Do a job as a process of ``launch`` and return its result; rank 0 leaves a byte in ``progress`` for every step.

    A rank that fails waits to be ended, so the launcher sees a death before those that lost the connection to it.
    """
    end_with_parent()
    show_life(work, rank)

    def report(_: int) -> None:
        if rank == 0:
            with (work / "progress").open("ab") as file:
                file.write(b".")

    try:
        # A process that was forked has the number of threads of its server.
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))
        return job(report)
    except Exception as error:
        traceback.print_exc()
        _flush()
        write_failure(work, rank, error)
        while True:
            signal.pause()


def train_rank(report: Callable[[int], None], config: RunConfig, timeout_s: float) -> RunResult | None:
    """Train; rank 0 returns the result, the others None."""
    # A failing import is a failure of the rank, too.
    from entrain_bench.train.running.loop import train

    with named_wait("harness.timeout_s", timeout_s):
        return train(config, report)


def run_torchrun_rank(config: RunConfig, settings: TrainSettings, progress: Callable[[int], None]) -> RunResult:
    """Train as one of torchrun's ranks; only rank 0 returns, the others end, having nothing to record."""
    try:
        # Recorded, the first failure is the one that torchrun names.
        outcome = record(train_rank)(progress, config, settings.timeout_s)
    except Exception:
        # Once the command has printed its line.
        atexit.register(_end_at_once)
        raise
    if outcome is None:
        raise SystemExit(0)
    return outcome


def _end_at_once() -> None:
    """End this process without waiting for communication."""
    _flush()
    os._exit(1)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def write_failure(work: Path, rank: int, error: Exception) -> None:
    """Leave the exception that ends this rank."""
    failure = Failure.of(error, f"rank {rank}")
    write_atomically(work / f"failure{rank}.json", json.dumps(asdict(failure)).encode())


def read_failures(work: Path) -> dict[int, Failure]:
    """Return the failures that ranks left, by rank, the earliest first."""
    named = {
        int(path.stem.removeprefix("failure")): Failure(**json.loads(path.read_text()))
        for path in work.glob("failure*.json")
    }
    return dict(sorted(named.items(), key=lambda item: item[1].time_s))


def sign_of_life(work: Path, rank: int) -> Path:
    """Return the file whose modification time is that of a rank's last sign of life."""
    return work / f"alive{rank}"


def show_life(work: Path, rank: int) -> None:
    """Show every second, from a thread, that this process is neither stopped nor stuck."""

    def beat() -> None:
        while True:
            try:
                os.utime(sign_of_life(work, rank))
            except FileNotFoundError:
                # The launcher is done.
                return
            time.sleep(BEAT_S)

    threading.Thread(target=beat, name="show-life", daemon=True).start()


def silent_rank(work: Path, ranks: Iterable[int], least_s: float, until_s: float) -> tuple[int, float] | None:
    """Return the rank that was silent for longest until a time since the epoch, and for how long; None if too short."""
    silences = {rank: until_s - sign_of_life(work, rank).stat().st_mtime for rank in ranks}
    rank = max(silences, key=lambda one: silences[one], default=None)
    return None if rank is None or silences[rank] < max(least_s, 2 * BEAT_S) else (rank, silences[rank])


def first_cause(
    work: Path, num_ranks: int, exit_codes: Mapping[int, int], timeout_s: float, *, uses_nccl: bool
) -> Exception:
    """Return the failure that came first; if a rank waited in vain, it names the rank that was silent.

    ``exit_codes`` are those of ranks that died, negative for a signal.
    """
    failures = read_failures(work)
    for rank, code in exit_codes.items():
        # Dead without a failure of its own: other ranks say only that they lost it.
        if rank in failures:
            continue
        aborted = uses_nccl and code == -signal.SIGABRT
        cause = f"rank {rank}: {_how_it_ended(code, timeout_s if uses_nccl else None)}"
        if aborted:
            cause = _after_silence(work, num_ranks, rank, timeout_s, sign_of_life(work, rank).stat().st_mtime) + cause
        error = ExecutionError(cause)
        error.__cause__ = ExecutionError(f"last output of rank {rank}:\n{read_output(work, rank)}")
        return error
    rank, failure = next(iter(failures.items()))
    if not failure.waited_s:
        return failure.as_error()
    before = _after_silence(work, num_ranks, rank, failure.waited_s, failure.time_s)
    return Failure(**asdict(failure) | {"text": before + failure.text}).as_error()


def read_output(work: Path, rank: int) -> str:
    """Return the end of the standard output and error of a rank, which torch's launcher keeps in files."""
    texts = [path.read_text(errors="replace") for path in sorted(work.glob(f"*/attempt_0/{rank}/std*.log"))]
    return "".join(texts)[-OUTPUT_CHARS:]


def _after_silence(work: Path, num_ranks: int, waiting: int, waited_s: float, until_s: float) -> str:
    """Return the beginning of a line that names the rank for which another waited, if it was silent."""
    others = [rank for rank in range(num_ranks) if rank != waiting]
    if silent := silent_rank(work, others, SILENT_PART * waited_s, until_s):
        rank, silent_s = silent
        return f"rank {rank}: did not respond for {silent_s:.0f} s (stopped or hung); "
    return ""


def _how_it_ended(code: int, nccl_timeout_s: float | None) -> str:
    if code > 0:
        return f"exited with code {code}"
    if code == -signal.SIGABRT and nccl_timeout_s is not None:
        return f"aborted (SIGABRT); NCCL does so when it waited longer than harness.timeout_s={nccl_timeout_s:g}"
    return f"was killed by {signal.Signals(-code).name}"
