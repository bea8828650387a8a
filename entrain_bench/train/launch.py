"""Start the ranks of one machine with torch's elastic agent, and turn what ends them into one line."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from entrain_bench.config import RunConfig
from entrain_bench.errors import ExecutionError
from entrain_bench.experiment import Outcome
from entrain_bench.train.handover import config_to_json, read_failures, read_outcome

POLL_S = 0.2
# A rank that was killed is noticed later than what its end does to the others, but never this much later.
NOTICE_S = 5.0
# What the elastic agent takes over.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def start_ranks(config: RunConfig, num_ranks: int, progress: Callable[[int], None]) -> Outcome:
    """Train on ranks of this machine; the first that fails, or a signal to this process, ends all.

    Raises:
        UserError: what a rank found wrong with the input.
        ExecutionError: with the first cause, if a rank fails otherwise or dies.
    """
    with TemporaryDirectory(prefix="entrain-bench-") as folder:
        work = Path(folder)
        (work / "config.json").write_text(config_to_json(config))
        launch = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=POLL_S,
            logs_specs=DefaultLogsSpecs(log_dir=str(work / "logs"), redirects=Std.ALL),
        )
        with _quiet_agent(), _own_signals(), _worker_environment(config), _reporting(work, progress):
            try:
                elastic_launch(launch, sys.executable)("-m", "entrain_bench.train.worker", str(work))
            except ChildFailedError as error:
                raise first_cause(work, error) from None
            except SignalException as error:
                raise _end_by(error.sigval) from None
        return read_outcome(work)


def first_cause(work: Path, error: ChildFailedError) -> BaseException:
    """The failure that came first; later ones only follow from it."""
    killed = {
        rank: failure
        for rank, failure in error.failures.items()
        # The agent ends the others with SIGTERM.
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM
    }
    if any(failure.exitcode == -signal.SIGINT for failure in killed.values()):
        return KeyboardInterrupt()
    failures = read_failures(work)
    for rank, failure in killed.items():
        if not failures or failure.timestamp < failures[0].time_s + NOTICE_S:
            return ExecutionError(f"rank {rank}: was killed by {failure.signal_name()}")
    if failures:
        return failures[0].as_error()
    rank, failure = error.get_first_failure()
    return ExecutionError(f"rank {rank}: exited with code {failure.exitcode}")


def _end_by(ended_by: signal.Signals) -> BaseException:
    """What a signal to this process means to it, now that its ranks are gone."""
    return KeyboardInterrupt() if ended_by == signal.SIGINT else SystemExit(128 + ended_by)


@contextmanager
def _own_signals() -> Iterator[None]:
    """Give this process its signal handlers back, which the agent replaces for good."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in SIGNALS} if main else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """The agent logs every end of a rank; the first cause says it in one line."""
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith("torch.distrib")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@contextmanager
def _worker_environment(config: RunConfig) -> Iterator[None]:
    """What ranks inherit: the same modules; unless told otherwise one thread each, gloo on the loopback interface.

    Ranks that compute on the CPU see no GPU, for megatron-core takes one where it can.
    """
    wanted = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if config.harness["device"] == "cpu":
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


@contextmanager
def _reporting(work: Path, progress: Callable[[int], None]) -> Iterator[None]:
    """Pass on the number of finished iterations while the ranks run."""
    stopped = threading.Event()

    def poll() -> None:
        while not stopped.wait(POLL_S):
            if (work / "progress").exists():
                progress((work / "progress").stat().st_size)

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
