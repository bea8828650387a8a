"""Start the ranks of one machine, and turn what ends them into one line."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed as dist

from entrain_bench.config.schema import RunConfig
from entrain_bench.files import temporary_folder
from entrain_bench.records.outcome import Outcome
from entrain_bench.train.device import device_of
from entrain_bench.train.launching.failures import first_cause, sign_of_life
from entrain_bench.train.launching.handover import config_to_json, read_outcome
from entrain_bench.train.launching.processes import (
    LOCALHOST,
    environment_of_ranks,
    modules_of,
    prepare_server,
    start_processes,
)
from entrain_bench.train.launching.worker import RankJob, train_rank
from entrain_bench.train.settings import TrainSettings

POLL_S = 0.2
# A rank that died may be noticed after those it left alone with a message, but hardly later than this.
NOTICE_S = 0.5
# What would end this process without ending its ranks; SIGINT raises KeyboardInterrupt.
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def start_ranks(config: RunConfig, settings: TrainSettings, progress: Callable[[int], None]) -> Outcome:
    """Train on ranks of this machine; raises what ``run_on_ranks`` does."""
    device = device_of(settings).type
    crew = Crew(device, settings.num_ranks, settings.timeout_s, tuple(modules_of(config)))
    job = partial(train_rank, timeout_s=settings.timeout_s)
    files = {"config.json": config_to_json(config)}
    return run_on_ranks(job, crew, files, read_outcome, progress)


@dataclass(frozen=True, slots=True)
class Crew:
    """Ranks of this machine.

    Attributes:
        device: ``cpu`` or ``cuda``.
        num_ranks: how many.
        timeout_s: longest time a rank waits for another.
        modules: what they are the faster for finding imported.
    """

    device: str
    num_ranks: int
    timeout_s: float
    modules: tuple[str, ...] = ()


def run_on_ranks[T](
    job: RankJob, crew: Crew, files: Mapping[str, str], collect: Callable[[Path], T], progress: Callable[[int], None]
) -> T:
    """Do a job on ranks of this machine; the first that fails, or a signal to this process, ends all.

    Args:
        job: what each rank does.
        crew: the ranks.
        files: what they find in the folder they share, by name.
        collect: reads what they left there.
        progress: called with the number of steps that rank 0 has reported.

    Raises:
        UserError: what a rank found wrong with the input.
        ExecutionError: with the first cause, if a rank fails otherwise or dies.
        SystemExit: with 128 plus its number, for a signal that ends this process.
    """
    device = crew.device
    ranks: list[BaseProcess] = []
    with _signals_raise(), temporary_folder("entrain-bench-") as work, environment_of_ranks(device):
        for name, text in files.items():
            (work / name).write_text(text)
        for rank in range(crew.num_ranks):
            sign_of_life(work, rank).touch()
        # Ranks meet at a store of this process, which outlives every one of them.
        store = dist.TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        try:
            if device == "cpu":
                prepare_server(crew.modules)
            start_processes(ranks, device, crew.num_ranks, store.port, work, job)
            exit_codes = _watch(ranks, work, progress)
        finally:
            for process in ranks:
                process.kill()
            for process in ranks:
                process.join()
                process.close()
        if any(exit_codes.values()):
            raise first_cause(work, exit_codes, crew.timeout_s, uses_nccl=device == "cuda")
        return collect(work)


def _watch(ranks: list[BaseProcess], work: Path, progress: Callable[[int], None]) -> dict[int, int | None]:
    """Exit codes by rank once all have ended, or some have and one of them failed."""
    while not any(process.exitcode for process in ranks):
        running = [process.sentinel for process in ranks if process.exitcode is None]
        if not running:
            break
        wait(running, POLL_S)
        if (work / "progress").exists():
            progress((work / "progress").stat().st_size)
    else:
        time.sleep(NOTICE_S)
    return {rank: process.exitcode for rank, process in enumerate(ranks)}


@contextmanager
def _signals_raise() -> Iterator[None]:
    """End this process by an exception, so that it ends its ranks and removes the folder first.

    Signals that are ignored (``nohup``), or that the caller handles, are left alone.
    """

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    main = threading.current_thread() is threading.main_thread()
    taken = [number for number in SIGNALS if main and signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
