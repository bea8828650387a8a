"""One rank's life: started on this machine by ``launch``, or by torchrun."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from entrain_bench.config.schema import RunConfig
from entrain_bench.records.run_result import RunResult
from entrain_bench.run.parallel import end_with_parent
from entrain_bench.train.launching.failures import show_life, write_failure
from entrain_bench.train.settings import TrainSettings

# Job of a rank; its argument reports a finished step.
type RankJob = Callable[[Callable[[int], None]], Any]


def run_rank(work: Path, rank: int, job: RankJob) -> Any:
    """Do a job as a process of ``launch`` and return its result; rank 0 leaves a byte in ``progress`` for every step.

    A rank that fails leaves its failure and stays until the launcher ends it: so the launcher sees the death of another
    rank before those that lost the connection to it.
    """
    end_with_parent()
    show_life(work, rank)

    def report(_: int) -> None:
        if rank == 0:
            with (work / "progress").open("ab") as file:
                file.write(b".")

    try:
        # A failing import is a failure of the rank, too.
        import torch

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
    from entrain_bench.train.messages.control import named_wait
    from entrain_bench.train.running.loop import train

    with named_wait("harness.timeout_s", timeout_s):
        return train(config, report)


def run_torchrun_rank(config: RunConfig, settings: TrainSettings, progress: Callable[[int], None]) -> RunResult:
    """Train as one of torchrun's ranks; only rank 0 returns, the others end, having nothing to record."""
    from torch.distributed.elastic.multiprocessing.errors import record

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
    """End this process; an orderly end would wait for communication that no one takes part in any more."""
    _flush()
    os._exit(1)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
