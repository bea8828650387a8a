"""Start the ranks of one machine by torch's elastic API, and turn what ends them into one line."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import forkserver, get_start_method, set_start_method
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

from entrain_bench.base.files import temporary_folder
from entrain_bench.config.schema import RunConfig
from entrain_bench.records.run_result import RunResult
from entrain_bench.run.parallel import uninterrupted
from entrain_bench.train.device import device_of
from entrain_bench.train.launching.worker import RankJob, first_cause, run_rank, sign_of_life, train_rank
from entrain_bench.train.messages.control import process_group
from entrain_bench.train.settings import ON_LOOPBACK, TrainSettings, connections_unless_given

LOCALHOST = "127.0.0.1"
# Seconds that ranks wait for one another in ``on_ranks``.
TIMEOUT_S = 120.0
POLL_S = 0.2
PERIOD_S = 0.02
# Seconds after a failure in which the death of another rank, which may be its cause, is noticed.
NOTICE_S = 0.5
# Seconds that killed ranks may take to be gone.
END_S = 10
# Signals that end this process; SIGINT raises KeyboardInterrupt.
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def start_ranks(config: RunConfig, settings: TrainSettings, progress: Callable[[int], None]) -> RunResult:
    """Train on ranks of this machine; raises what ``run_on_ranks`` does."""
    job = partial(train_rank, config=config, timeout_s=settings.timeout_s)
    parts = (config.workload, *config.strategy.values())
    targets = [part["_target_"] for part in parts if isinstance(part, Mapping) and "_target_" in part]
    modules = [target.rpartition(".")[0] for target in targets]
    device = device_of(settings).type
    results = run_on_ranks(job, settings.num_ranks, device, settings.timeout_s, progress, modules)
    outcome = results[0]
    assert isinstance(outcome, RunResult)
    return outcome


def on_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, device: str = "cpu", cores: Sequence[int] = ()
) -> list[Any]:
    """Call ``function(*args, group)`` on every rank and return the results by rank; raises as ``run_on_ranks``.

    ``group`` is a gloo group of all ranks. Ranks are pinned to ``cores`` in turn, if there are any.
    """
    return run_on_ranks(partial(_call, function, args, device, tuple(cores)), num_ranks, device, TIMEOUT_S)


def run_on_ranks(
    job: RankJob,
    num_ranks: int,
    device: str,
    timeout_s: float,
    progress: Callable[[int], None] = lambda _: None,
    modules: Sequence[str] = (),
) -> list[Any]:
    """Do a job on ranks of this machine and return the results by rank; the first failure, or a signal, ends all.

    ``progress`` is told the steps of rank 0. On a CPU ``modules`` are imported once for all ranks.

    Raises:
        UserError: what a rank found wrong with the input.
        ExecutionError: with the first cause, if a rank fails otherwise or dies.
        SystemExit: with 128 plus its number, for a signal that ends this process.
    """
    # Torch logs what becomes one line here.
    for name in ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn"):
        logging.getLogger(name).disabled = True
    processes: PContext | None = None
    with temporary_folder("entrain-bench-") as work, environment_of_ranks(device), _signals_raise():
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
            processes = _start(job, num_ranks, device, port, work, modules)
            result = _watch(processes, work, progress)
        finally:
            if processes is not None:
                processes.close(signal.SIGKILL, END_S)
        if result is None or result.is_failed():
            exit_codes = {rank: failure.exitcode for rank, failure in result.failures.items()} if result else {}
            raise first_cause(work, num_ranks, exit_codes, timeout_s, uses_nccl=device == "cuda")
        return [result.return_values[rank] for rank in range(num_ranks)]


def _start(job: RankJob, num_ranks: int, device: str, port: int, work: Path, modules: Sequence[str]) -> PContext:
    # A server that asked for GPUs cannot fork a process that uses them.
    method = "forkserver" if device == "cpu" else "spawn"
    if device == "cpu":
        forkserver.set_forkserver_preload(["entrain_bench.train.launching.preload", *modules])
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


def _watch(processes: PContext, work: Path, progress: Callable[[int], None]) -> RunProcsResult | None:
    """Return the results of all ranks, or the death of one; None if a rank left a failure."""
    while True:
        result = processes.wait(POLL_S, PERIOD_S)
        if (work / "progress").exists():
            progress((work / "progress").stat().st_size)
        if result is not None:
            return result
        if any(work.glob("failure*.json")):
            return processes.wait(NOTICE_S, PERIOD_S)


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
    # The signals for which torch's launcher installs its handler.
    default = [number.name for number in SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    wanted["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(default)
    before = dict(os.environ)
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in wanted:
            del os.environ[name]
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


def pin(cores: Sequence[int], index: int) -> None:
    """Keep this process, and threads that it starts later, on one of the cores, where the system supports it."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cores[index % len(cores)]})


def _call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    device: str,
    cores: Sequence[int],
    _: Callable[[int], None],
) -> Any:
    rank = int(os.environ["RANK"])
    pin(cores, rank)
    with process_group(torch.device(device, rank) if device == "cuda" else torch.device("cpu"), TIMEOUT_S) as group:
        return function(*args, group)
