"""Ranks of one machine, started by torch's elastic API or by torchrun; a failure becomes one line."""

from __future__ import annotations

import atexit
import json
import logging
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing import forkserver, get_start_method, set_start_method
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    PContext,
    RunProcsResult,
    SignalException,
    Std,
    start_processes,
)
from torch.distributed.elastic.multiprocessing.errors import record

from entrain_bench.base.errors import ExecutionError
from entrain_bench.base.files import temporary_folder, write_atomically
from entrain_bench.config.schema import RunConfig
from entrain_bench.records.metrics import RunResult
from entrain_bench.run.experiment import Watcher, unwatched
from entrain_bench.run.parallel import end_with_parent, uninterrupted
from entrain_bench.train.device import device_of
from entrain_bench.train.messages.control import named_wait, portable, process_group
from entrain_bench.train.settings import CONNECTIONS, MOST_CONNECTIONS, ON_LOOPBACK, TrainSettings

LOCALHOST = "127.0.0.1"
# Seconds that ranks wait for one another in ``on_ranks``.
TIMEOUT_S = 120.0
POLL_S = 0.2
PROGRESS = "progress"
PERIOD_S = 0.02
# Seconds after a failure in which the death of another rank, which may be its cause, is noticed.
NOTICE_S = 0.5
# Seconds that killed ranks may take to be gone.
END_S = 10
# Signals that end this process; SIGINT raises KeyboardInterrupt.
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# Job of a rank; its argument reports a finished step.
type RankJob = Callable[[Watcher], Any]
# A crash prints a stack of every thread, and the names of all extension modules.
OUTPUT_CHARS = 20_000


def start_ranks(config: RunConfig, settings: TrainSettings, progress: Watcher) -> RunResult:
    """Train on ranks of this machine; raises as ``run_on_ranks``."""
    job = partial(train_rank, config=config, timeout_s=settings.timeout_s)
    device = device_of(settings).type
    outcome, *_ = run_on_ranks(job, settings.num_ranks, device, settings.timeout_s, progress)
    assert isinstance(outcome, RunResult)
    return outcome


def on_ranks(function: Callable[..., Any], num_ranks: int, *args: Any, device: str = "cpu") -> list[Any]:
    """Call ``function(*args, group)`` on every rank and return the results by rank; raises as ``run_on_ranks``.

    ``group`` is a gloo group of all ranks.
    """
    return run_on_ranks(partial(_call, function, args, device), num_ranks, device, TIMEOUT_S)


def run_on_ranks(
    job: RankJob,
    num_ranks: int,
    device: str,
    timeout_s: float,
    progress: Watcher = unwatched,
) -> list[Any]:
    """Do a job on ranks of this machine and return the results by rank; the first failure, or a signal, ends all.

    ``progress`` is told the steps of rank 0. Raises ``UserError`` for bad input, ``ExecutionError`` with the first
    cause, ``SystemExit`` (128 plus its number) for a signal.
    """
    # Torch logs the failures that become one line here.
    for name in ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn"):
        logging.getLogger(name).disabled = True
    processes: PContext | None = None
    with temporary_folder("entrain-bench-") as work, environment_of_ranks(device), _signals_raise():
        # Ranks meet at a store of this process, which outlives them. By default it would listen on all addresses.
        listener = socket.create_server((LOCALHOST, 0))
        port = listener.getsockname()[1]
        _store = dist.TCPStore(  # type: ignore[attr-defined]
            LOCALHOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        try:
            processes = _start(job, num_ranks, device, port, work)
            result = _watch(processes, work, progress)
        finally:
            if processes is not None:
                processes.close(signal.SIGKILL, END_S)
        if result is None or result.is_failed():
            exit_codes = {rank: failure.exitcode for rank, failure in result.failures.items()} if result else {}
            raise first_cause(work, exit_codes, timeout_s if device == "cuda" else None)
        return [result.return_values[rank] for rank in range(num_ranks)]


def _start(job: RankJob, num_ranks: int, device: str, port: int, work: Path) -> PContext:
    # A server that asked for GPUs cannot fork a process that uses them.
    method = "forkserver" if device == "cpu" else "spawn"
    forkserver.set_forkserver_preload(["entrain_bench.train.loop"])
    # All of it: a server has the environment of its own start.
    shared = {
        **os.environ,
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": LOCALHOST,
        "MASTER_PORT": str(port),
        # Else rank 0 would make a store of its own.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    logs = DefaultLogsSpecs(log_dir=str(work), redirects=Std.ALL)
    args = {rank: (work, rank, job) for rank in range(num_ranks)}
    envs = {rank: {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)}
    # Processes get a method of Python's own as their default: they do not know that of a joblib worker, loky.
    before = get_start_method(allow_none=True)
    set_start_method(method, force=True)
    try:
        with _silent(), uninterrupted():
            return start_processes("ranks", run_rank, args, envs, logs, start_method=method)
    finally:
        set_start_method(before, force=True)


@contextmanager
def _silent() -> Iterator[None]:
    """Hide standard error of starting processes: interrupted ones would print a traceback."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _watch(processes: PContext, work: Path, progress: Watcher) -> RunProcsResult | None:
    """Return the results of all ranks, or the death of one; None if a rank left a failure."""
    told = 0
    while True:
        result = processes.wait(POLL_S, PERIOD_S)
        if (work / PROGRESS).exists():
            # The last line may be half written.
            *whole, _ = (work / PROGRESS).read_text().split("\n")
            for line in whole[told:]:
                progress(*json.loads(line))
            told = len(whole)
        if result is not None:
            return result
        if any(work.glob("failure*")):
            return processes.wait(NOTICE_S, PERIOD_S)


@contextmanager
def environment_of_ranks(device: str) -> Iterator[None]:
    """Set the environment that ranks inherit. On CPU, hide GPUs, because megatron-core uses any it can see."""
    wanted = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **ON_LOOPBACK}
    if device == "cpu":
        wanted["CUDA_VISIBLE_DEVICES"] = ""
    wanted["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    # The signals for which torch's launcher installs its handler.
    default = [number.name for number in SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    wanted["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(default)
    before = dict(os.environ)
    os.environ.update(wanted)
    os.environ.setdefault(CONNECTIONS, MOST_CONNECTIONS)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Raise ``SystemExit`` for a signal that torch's handler turned into an exception; restore the handlers."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    except SignalException as caught:
        raise SystemExit(128 + caught.sigval) from caught
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def _call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    device: str,
    _: Watcher,
) -> Any:
    rank = int(os.environ["RANK"])
    with process_group(torch.device(device, rank) if device == "cuda" else torch.device("cpu"), TIMEOUT_S) as group:
        return function(*args, group)


def run_rank(work: Path, rank: int, job: RankJob) -> Any:
    """Do a job as a process of ``launch`` and return its result; rank 0 leaves a line in a file for every step.

    A rank that fails waits to be ended, so the launcher sees a death before those that lost the connection to it.
    """
    end_with_parent()

    def report(done: int, values: Mapping[str, float] | None = None, /) -> None:
        if rank == 0:
            with (work / PROGRESS).open("a") as file:
                file.write(json.dumps([done, values]) + "\n")

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


def train_rank(report: Watcher, config: RunConfig, timeout_s: float) -> RunResult | None:
    """Train; rank 0 returns the result, the others None."""
    # A failing import is a failure of the rank, too.
    from entrain_bench.train.loop import train

    with named_wait("harness.timeout_s", timeout_s):
        return train(config, report)


def run_torchrun_rank(config: RunConfig, settings: TrainSettings, progress: Watcher) -> RunResult:
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
    failure = time.time(), portable(error, f"rank {rank}")
    write_atomically(work / f"failure{rank}", pickle.dumps(failure))


def first_cause(work: Path, exit_codes: Mapping[int, int], nccl_timeout_s: float | None) -> Exception:
    """Return the failure that came first; ``exit_codes`` are those of ranks that died, negative for a signal."""
    # A file of this run's own ranks, in a folder that other users cannot write to.
    failures = {
        int(path.name.removeprefix("failure")): pickle.loads(path.read_bytes())  # noqa: S301
        for path in work.glob("failure*")
    }
    # It died without reporting a failure: other ranks only report that they lost it.
    for rank in exit_codes.keys() - failures.keys():
        code = exit_codes[rank]
        how = f"exited with code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
        if code == -signal.SIGABRT and nccl_timeout_s is not None:
            waited = f"NCCL does so when it waited longer than harness.timeout_s={nccl_timeout_s:g}"
            how = f"aborted (SIGABRT); {waited}"
        # Torch's launcher keeps the output of ranks in files.
        logs = sorted(work.glob(f"*/attempt_0/{rank}/std*.log"))
        printed = "".join(path.read_text(errors="replace") for path in logs)[-OUTPUT_CHARS:]
        error = ExecutionError(f"rank {rank}: {how}")
        error.__cause__ = ExecutionError(f"last output of rank {rank}:\n{printed}")
        return error
    _, error = min(failures.values(), key=itemgetter(0))
    assert isinstance(error, Exception)
    return error
