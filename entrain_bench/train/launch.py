"""Start the ranks of one machine, and turn what ends them into one line."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from multiprocessing import forkserver, get_context, get_start_method, resource_tracker, set_start_method
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist

from entrain_bench.config.schema import RunConfig
from entrain_bench.errors import ExecutionError
from entrain_bench.records.outcome import Outcome
from entrain_bench.train.handover import config_to_json, read_failures, read_outcome, read_output
from entrain_bench.train.harness import TrainHarness
from entrain_bench.train.worker import run_rank

POLL_S = 0.2
# A rank that died may be noticed after those it left alone with a message, but hardly later than this.
NOTICE_S = 0.5
LOCALHOST = "127.0.0.1"
# What would end this process without ending its ranks; SIGINT raises KeyboardInterrupt.
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def start_ranks(config: RunConfig, harness: TrainHarness, progress: Callable[[int], None]) -> Outcome:
    """Train on ranks of this machine; the first that fails, or a signal to this process, ends all.

    Raises:
        UserError: what a rank found wrong with the input.
        ExecutionError: with the first cause, if a rank fails otherwise or dies.
        SystemExit: with 128 plus its number, for a signal that ends this process.
    """
    device = harness.torch_device.type
    ranks: list[BaseProcess] = []
    with _signals_raise(), TemporaryDirectory(prefix="entrain-bench-") as folder, _environment(device):
        work = Path(folder)
        (work / "config.json").write_text(config_to_json(config))
        # Ranks meet at a store of this process, which outlives every one of them.
        store = dist.TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        try:
            if device == "cpu":
                _prepare_server(config)
            _start(ranks, device, harness.num_ranks, store.port, (work, harness.timeout_s))
            exit_codes = _watch(ranks, work, progress)
        finally:
            for process in ranks:
                process.kill()
            for process in ranks:
                process.join()
                process.close()
        if any(exit_codes.values()):
            raise first_cause(work, exit_codes, harness.timeout_s if device == "cuda" else None)
        return read_outcome(work)


def first_cause(work: Path, exit_codes: Mapping[int, int | None], nccl_timeout_s: float | None) -> Exception:
    """The failure that came first; later ones only follow from it.

    Args:
        work: the folder in which ranks leave their failures.
        exit_codes: of every rank, by rank; the number of a signal is negative, None is a rank that still ran.
        nccl_timeout_s: after which NCCL aborts a rank that waits; None if ranks do not use it.
    """
    failures = read_failures(work)
    explained = {failure.rank for failure in failures}
    for rank, code in exit_codes.items():
        # Dead without a word: what the others say is that they lost it.
        if code and rank not in explained:
            error = ExecutionError(f"rank {rank}: {_how_it_ended(code, nccl_timeout_s)}")
            error.__cause__ = ExecutionError(f"last output of rank {rank}:\n{read_output(work, rank)}")
            return error
    return failures[0].as_error()


def _how_it_ended(code: int, nccl_timeout_s: float | None) -> str:
    if code > 0:
        return f"exited with code {code}"
    if code == -signal.SIGABRT and nccl_timeout_s is not None:
        return f"aborted (SIGABRT); NCCL does so when it waited longer than harness.timeout_s={nccl_timeout_s:g}"
    return f"was killed by {signal.Signals(-code).name}"


def _prepare_server(config: RunConfig) -> None:
    """See to a server that imports what takes seconds, for ranks to fork from; a sweep's next run finds it ready.

    It ends with this process. Only for ranks on a CPU: what is imported asks for GPUs (``torch.utils.cpp_extension``),
    and a fork of a process that did so cannot use one.
    """
    parts = (config.workload, *config.strategy.values())
    modules = [
        part["_target_"].rpartition(".")[0] for part in parts if isinstance(part, Mapping) and "_target_" in part
    ]
    forkserver.set_forkserver_preload(["entrain_bench.train.preload", *modules])
    with _uninterrupted():
        forkserver.ensure_running()


def _start(ranks: list[BaseProcess], device: str, num_ranks: int, port: int, arguments: tuple[Path, float]) -> None:
    """Start the ranks' processes, appending each."""
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": LOCALHOST,
        "MASTER_PORT": str(port),
        # Else rank 0 would make a store of its own.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    context = get_context("forkserver") if device == "cpu" else get_context("spawn")
    with _start_method(context.get_start_method()):
        for rank in range(num_ranks):
            # All of it: a server has the environment of its own start.
            environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = context.Process(target=run_rank, args=(environment, *arguments), daemon=True)
            with nullcontext() if device == "cpu" else _uninterrupted():
                process.start()
            ranks.append(process)


@contextmanager
def _start_method(method: str) -> Iterator[None]:
    """Hand a method of Python's own to processes as their default: they do not know that of a joblib worker, loky."""
    before = get_start_method(allow_none=True)
    set_start_method(method, force=True)
    try:
        yield
    finally:
        set_start_method(before, force=True)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C reaches every process of the terminal: those started here inherit that they do not see it."""
    # Started later, it would unblock the signal.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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


@contextmanager
def _environment(device: str) -> Iterator[None]:
    """What ranks inherit: the same modules; unless told otherwise one thread each, gloo on the loopback interface.

    Ranks that compute on the CPU see no GPU, for megatron-core takes one where it can.
    """
    wanted = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if device == "cpu":
        wanted["CUDA_VISIBLE_DEVICES"] = ""
    defaults = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    wanted |= {name: value for name, value in defaults.items() if name not in os.environ}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
