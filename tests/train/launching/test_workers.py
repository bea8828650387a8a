"""A killed rank or command leaves no process; nobody listens on other interfaces than loopback."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import run_experiment
from support.processes import descendants_of
from support.train.launched import TWO_RANKS, processes_of_session, start
from support.train.runs import DISJOINT, SETTING


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("number", "to_all"), [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGKILL, False)]
)
def test_a_signal_to_the_command_leaves_no_rank(tmp_path: Path, number: signal.Signals, to_all: bool) -> None:
    run = ["model=tiny", "iterations=500"]
    command = start("-m", "entrain_bench.cli", *TWO_RANKS, *run, f"results_dir={tmp_path}", "mlflow=false")
    # The command, the server that ranks fork from, the tracker of both, two ranks.
    while processes_of_session(command.pid) < 5:
        assert command.poll() is None
        time.sleep(0.1)
    time.sleep(5)
    (os.killpg if to_all else os.kill)(command.pid, number)
    command.communicate()
    deadline = time.monotonic() + 60
    while processes_of_session(command.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of_session(command.pid) == 0


def listeners(processes: set[int]) -> set[tuple[int, str]]:
    """Processes that listen for TCP connections, and at which address."""
    listening = set()
    for process in processes:
        with suppress(psutil.Error):
            sockets = psutil.Process(process).net_connections("tcp")
            listening |= {(process, socket.laddr.ip) for socket in sockets if socket.status == psutil.CONN_LISTEN}
    return listening


@contextmanager
def watching() -> Iterator[set[tuple[int, str]]]:
    """All listeners among this process and those below it, while it does something."""
    seen: set[tuple[int, str]] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.05):
            seen.update(listeners({os.getpid(), *descendants_of(os.getpid())}))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def test_a_socket_that_others_reach_is_found() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert (os.getpid(), "::") in listeners({os.getpid()})
    del store


@pytest.mark.wide
def test_training_listens_on_loopback_only(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What a user may have set for jobs on several machines.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    config = compose_cells([*SETTING, *DISJOINT, "iterations=2"])[0].config
    with watching() as seen:
        assert len(run_experiment(config).iterations) == 2
    assert all(ip_address(address).is_loopback for _, address in seen)
    # The store of this process, and every rank.
    assert len({process for process, _ in seen}) >= 5
    assert not list(temporary.glob("entrain-bench-*"))
