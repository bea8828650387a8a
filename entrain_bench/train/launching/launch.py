"""Start the ranks of one machine, and turn what ends them into one line."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed as dist

from entrain_bench.base.files import temporary_folder
from entrain_bench.config.schema import RunConfig
from entrain_bench.records.outcome import Outcome
from entrain_bench.train.device import device_of
from entrain_bench.train.launching.failures import first_cause, sign_of_life
from entrain_bench.train.launching.handover import read_outcome
from entrain_bench.train.launching.processes import (
    LOCALHOST,
    context_of,
    environment_of_ranks,
    prepare_server,
    start_processes,
)
from entrain_bench.train.launching.producers import num_producers, start_producers
from entrain_bench.train.launching.worker import RankJob, train_rank
from entrain_bench.train.producing.rendezvous import Rendezvous
from entrain_bench.train.settings import TrainSettings

POLL_S = 0.2
# A rank that died may be noticed after those it left alone with a message, but hardly later than this.
NOTICE_S = 0.5
# What would end this process without ending its ranks; SIGINT raises KeyboardInterrupt.
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def start_ranks(config: RunConfig, settings: TrainSettings, progress: Callable[[int], None]) -> Outcome:
    """Train on ranks of this machine; raises what ``run_on_ranks`` does."""
    device, num = device_of(settings).type, num_producers(settings, settings.num_ranks)
    job = partial(train_rank, config=config, timeout_s=settings.timeout_s, num_producers=num)
    ranks = settings.num_ranks, device, settings.timeout_s
    return run_on_ranks(job, *ranks, read_outcome, progress, config=config, num_producers=num)


def run_on_ranks[T](
    job: RankJob,
    num_ranks: int,
    device: str,
    timeout_s: float,
    collect: Callable[[Path], T],
    progress: Callable[[int], None] = lambda _: None,
    config: RunConfig | None = None,
    num_producers: int = 0,
) -> T:
    """Do a job on ranks of this machine; the first that fails, or a signal to this process, ends all.

    ``collect`` reads what they leave in the folder they share; ``progress`` is told the steps that rank 0 has reported.
    A rank waits ``timeout_s`` at most for another; ``config`` is that of a run, whose inputs producers may make.

    Raises:
        UserError: what a rank found wrong with the input.
        ExecutionError: with the first cause, if a rank fails otherwise or dies.
        SystemExit: with 128 plus its number, for a signal that ends this process.
    """
    ranks, producers = list[BaseProcess](), list[BaseProcess]()
    with _signals_raise(), temporary_folder("entrain-bench-") as work, environment_of_ranks(device):
        for rank in range(num_ranks):
            sign_of_life(work, rank).touch()
        # Ranks meet at a store of this process, which outlives every one of them. Left to listen, it would do so on all
        # of the machine's addresses.
        listener = socket.create_server((LOCALHOST, 0))
        port = listener.getsockname()[1]
        _store = dist.TCPStore(  # type: ignore[attr-defined]
            LOCALHOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        try:
            if device == "cpu":
                prepare_server(config)
            if config and num_producers:
                rendezvous = Rendezvous(work, num_producers)
                start_producers(producers, config, rendezvous, num_ranks, context_of(device), work)
            start_processes(ranks, device, num_ranks, port, work, job)
            exit_codes, of_producers = _watch(ranks, producers, work, progress)
        finally:
            for process in (*ranks, *producers):
                process.kill()
            for process in (*ranks, *producers):
                process.join()
                process.close()
        if any((*exit_codes.values(), *of_producers.values())):
            raise first_cause(work, exit_codes, timeout_s, uses_nccl=device == "cuda", producers=of_producers)
        return collect(work)


def _watch(
    ranks: list[BaseProcess], producers: list[BaseProcess], work: Path, progress: Callable[[int], None]
) -> tuple[dict[int, int | None], dict[int, int | None]]:
    """Exit codes by rank and by producer once all ranks have ended, or one of all these processes has failed."""
    while not any(process.exitcode for process in (*ranks, *producers)):
        if all(process.exitcode is not None for process in ranks):
            break
        wait([process.sentinel for process in (*ranks, *producers) if process.exitcode is None], POLL_S)
        if (work / "progress").exists():
            progress((work / "progress").stat().st_size)
    else:
        time.sleep(NOTICE_S)
    codes = [{number: process.exitcode for number, process in enumerate(kind)} for kind in (ranks, producers)]
    return codes[0], codes[1]


@contextmanager
def _signals_raise() -> Iterator[None]:
    """End this process by an exception, so that it tidies up first; signals ignored or handled elsewhere stay so."""

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
