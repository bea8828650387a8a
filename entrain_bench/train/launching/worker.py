"""One rank: started on this machine by ``launch``, or by torchrun; and the outcome that it leaves."""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from entrain_bench.config.schema import RunConfig
from entrain_bench.program.layout import layout_from_json, layout_to_json
from entrain_bench.records.run_result import RunResult
from entrain_bench.train.launching.failures import begin_process, output_path, show_life, write_failure
from entrain_bench.train.settings import TrainSettings

if TYPE_CHECKING:
    from entrain_bench.train.running.loop import Producers

# What a rank does: it is given the folder shared with the process that started it, and whom to tell of its progress.
type RankJob = Callable[[Path, Callable[[int], None]], None]


def run_rank(environment: Mapping[str, str], work: Path, job: RankJob) -> None:
    """Do a job as a process of ``launch``; rank 0 leaves a byte in ``progress`` for every step."""
    rank = int(environment["RANK"])
    begin_process(environment, output_path(work, rank))
    faulthandler.enable()
    show_life(work, rank)

    def report(_: int) -> None:
        if rank == 0:
            with (work / "progress").open("ab") as file:
                file.write(b".")

    try:
        # What importing goes wrong with is a failure of the rank, too.
        import torch

        # A process that was forked has the number of its server.
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"].split(",")[0]))
        job(work, report)
    except Exception as error:
        write_failure(work, rank, error)
        traceback.print_exc()
        _end_at_once()


def train_rank(
    work: Path, report: Callable[[int], None], config: RunConfig, timeout_s: float, num_producers: int
) -> None:
    """Train; rank 0 leaves the outcome in the folder, where producers listen, too."""
    from entrain_bench.train.producing.reader import Rendezvous

    rendezvous = Rendezvous(work, num_producers) if num_producers else None
    outcome = _train(config, timeout_s, report, lambda _: nullcontext(rendezvous))
    if outcome is not None:
        write_outcome(work, outcome)


def write_outcome(work: Path, outcome: RunResult) -> None:
    """Leave an outcome for the process that started the ranks."""
    if outcome.timeline is not None:
        outcome.timeline.to_parquet(work / "timeline.parquet", index=False)
    values = {name: getattr(outcome, name) for name in ("metrics", "iterations", "execution", "remarks")}
    (work / "outcome.json").write_text(json.dumps(values | {"layout": layout_to_json(outcome.layout)}))


def read_outcome(work: Path) -> RunResult:
    """The outcome that rank 0 left."""
    values = json.loads((work / "outcome.json").read_text())
    timeline = work / "timeline.parquet"
    return RunResult(
        layout_from_json(values["layout"]),
        values["metrics"],
        tuple(values["iterations"]),
        pd.read_parquet(timeline) if timeline.exists() else None,
        execution=values["execution"],
        remarks=tuple(values["remarks"]),
    )


def run_torchrun_rank(config: RunConfig, settings: TrainSettings, progress: Callable[[int], None]) -> RunResult:
    """Train as one of torchrun's ranks; only rank 0 returns, the others end, having nothing to record."""
    from torch.distributed.elastic.multiprocessing.errors import record

    from entrain_bench.train.launching.producers import producers_under_torchrun

    try:
        # Recorded, the first failure is the one that torchrun names.
        producers = partial(producers_under_torchrun, config, settings)
        outcome = record(_train)(config, settings.timeout_s, progress, producers)
    except Exception:
        # Once the command has printed its line.
        atexit.register(_end_at_once)
        raise
    if outcome is None:
        raise SystemExit(0)
    return outcome


def _train(
    config: RunConfig, timeout_s: float, progress: Callable[[int], None], producers: Producers
) -> RunResult | None:
    from entrain_bench.train.messages.control import named_wait
    from entrain_bench.train.running.loop import train

    with named_wait("harness.timeout_s", timeout_s):
        return train(config, progress, producers)


def _end_at_once() -> None:
    """End this process; an orderly end would wait for communication that no one takes part in any more."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
