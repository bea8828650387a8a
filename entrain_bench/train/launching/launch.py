"""Start the ranks of one machine, to train or to call a function, and turn what ends them into one line."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing import forkserver, get_context, get_start_method, set_start_method
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from entrain_bench.base.files import temporary_folder
from entrain_bench.config.schema import RunConfig
from entrain_bench.records.run_result import RunResult
from entrain_bench.run.parallel import uninterrupted
from entrain_bench.train.connections import ON_LOOPBACK, connections_unless_given
from entrain_bench.train.device import device_of
from entrain_bench.train.launching.failures import first_cause, sign_of_life
from entrain_bench.train.launching.producers import num_producers, start_producers
from entrain_bench.train.launching.worker import RankJob, read_outcome, run_rank, train_rank
from entrain_bench.train.messages.control import process_group
from entrain_bench.train.producing.reader import Rendezvous
from entrain_bench.train.settings import TrainSettings

LOCALHOST = "127.0.0.1"
# That ranks wait for one another in ``on_ranks``.
TIMEOUT_S = 120.0
POLL_S = 0.2
# A rank that died may be noticed after those it left alone with a message, but hardly later than this.
NOTICE_S = 0.5
# What would end this process without ending its ranks; SIGINT raises KeyboardInterrupt.
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def start_ranks(config: RunConfig, settings: TrainSettings, progress: Callable[[int], None]) -> RunResult:
    """Train on ranks of this machine; raises what ``run_on_ranks`` does."""
    device = device_of(settings).type
    num = num_producers(settings, settings.num_ranks)
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
    ranks = list[BaseProcess]()
    producers = list[BaseProcess]()
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
            # A server that asked for GPUs cannot fork a process that uses them.
            context = get_context("forkserver") if device == "cpu" else get_context("spawn")
            if device == "cpu":
                _prepare_server(config)
            if config and num_producers:
                rendezvous = Rendezvous(work, num_producers)
                start_producers(producers, config, rendezvous, num_ranks, context, work)
            _start_processes(ranks, context, num_ranks, port, work, job)
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
def environment_of_ranks(device: str) -> Iterator[None]:
    """Set the environment that ranks inherit. On CPU, hide GPUs, because megatron-core uses any it can see."""
    wanted = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **ON_LOOPBACK}
    if device == "cpu":
        wanted["CUDA_VISIBLE_DEVICES"] = ""
    else:
        wanted |= connections_unless_given(os.environ)
    if "OMP_NUM_THREADS" not in os.environ:
        wanted["OMP_NUM_THREADS"] = "1"
    before = dict(os.environ)
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in wanted:
            del os.environ[name]
        os.environ.update(before)


def _prepare_server(config: RunConfig | None) -> None:
    """See to a server that imports what takes seconds, for ranks to fork from; a sweep's next run finds it ready.

    It ends with this process. Only for ranks on a CPU: what is imported asks for GPUs (``torch.utils.cpp_extension``),
    and a fork of a process that did so cannot use one.
    """
    parts = (config.workload, *config.strategy.values()) if config else ()
    targets = [part["_target_"] for part in parts if isinstance(part, Mapping) and "_target_" in part]
    modules = [target.rpartition(".")[0] for target in targets]
    forkserver.set_forkserver_preload(["entrain_bench.train.launching.preload", *modules])
    with uninterrupted():
        forkserver.ensure_running()


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


def _start_processes(
    ranks: list[BaseProcess],
    context: ForkServerContext | SpawnContext,
    num_ranks: int,
    port: int,
    work: Path,
    job: RankJob,
) -> None:
    """Start the ranks' processes, appending each."""
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": LOCALHOST,
        "MASTER_PORT": str(port),
        # Else rank 0 would make a store of its own.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    # Processes get a method of Python's own as their default: they do not know that of a joblib worker, loky.
    before = get_start_method(allow_none=True)
    set_start_method(context.get_start_method(), force=True)
    try:
        for rank in range(num_ranks):
            # All of it: a server has the environment of its own start.
            environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = context.Process(target=run_rank, args=(environment, work, job), daemon=True)
            with uninterrupted() if context.get_start_method() == "spawn" else nullcontext():
                process.start()
            ranks.append(process)
    finally:
        set_start_method(before, force=True)


def on_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, device: str = "cpu", cores: Sequence[int] = ()
) -> list[Any]:
    """Call ``function(*args, group)`` on every rank and return the results by rank.

    The function is importable by name and returns values that JSON can hold; ``group`` is a gloo group of all ranks, on
    ``cuda`` too. Ranks are pinned to ``cores`` in turn, if there are any. Raises as ``run_on_ranks``.
    """
    job = partial(_call, function, args, device, tuple(cores))

    def read(work: Path) -> list[Any]:
        return [json.loads((work / f"result{rank}.json").read_text()) for rank in range(num_ranks)]

    return run_on_ranks(job, num_ranks, device, TIMEOUT_S, read)


def pin(cores: Sequence[int], index: int) -> None:
    """Keep this process, and threads that it starts later, on one of the cores, where the system supports it."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cores[index % len(cores)]})


def _call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    device: str,
    cores: Sequence[int],
    work: Path,
    _: Callable[[int], None],
) -> None:
    rank = int(os.environ["RANK"])
    pin(cores, rank)
    with process_group(torch.device(device, rank) if device == "cuda" else torch.device("cpu"), TIMEOUT_S) as group:
        (work / f"result{rank}.json").write_text(json.dumps(function(*args, group)))
