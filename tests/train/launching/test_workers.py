"""Workers of a run's DataLoader change no loss and leave nothing; nobody listens on other interfaces than loopback."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch.distributed as dist

from entrain_bench.base.errors import ExecutionError
from entrain_bench.cli import run_command
from entrain_bench.lab.preprocessing import write_pictures
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare, run_experiment
from entrain_bench.train.running.data import num_workers
from entrain_bench.train.settings import PREPROCESSING, TrainSettings
from support.processes import descendants_of
from support.train.launched import TWO_RANKS, nothing_left, processes_of_session, ranks_started, start
from support.train.ranks import start_server
from support.train.runs import DISJOINT, SETTING

APART = "harness.preprocessing=processes"


def settings_of(*overrides: str) -> TrainSettings:
    executor = prepare(compose_cells([*TWO_RANKS, *overrides])[0].config).executor
    assert isinstance(executor, TrainSettings)
    return executor


def test_workers_take_the_cores_that_ranks_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(APART)
    for cores, workers in ((2, 1), (4, 1), (6, 2), (64, 2), (1, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert num_workers(settings) == workers
    assert num_workers(settings_of(APART, "harness.preprocessing_processes=3")) == 3


@pytest.mark.wide
@pytest.mark.parametrize(
    ("worker", "message"),
    [(True, r"^rank \d: RuntimeError: DataLoader worker \(.* "), (False, r"^rank \d: was killed by SIGKILL$")],
)
def test_a_killed_worker_or_rank_ends_the_run(temporary: Path, worker: bool, message: str) -> None:
    config = compose_cells([*TWO_RANKS, "model=tiny", APART, "iterations=500"])[0].config
    done = threading.Event()

    def kill() -> None:
        while not list(temporary.glob("entrain-bench-*/progress")):
            time.sleep(0.01)
        rank = ranks_started()[-1]
        os.kill(max(descendants_of(rank)) if worker else rank, signal.SIGKILL)
        done.set()

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(ExecutionError, match=f"(?m){message}"):
        run_experiment(config)
    assert done.is_set()
    assert nothing_left(temporary)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", [["layout.tp=2", "strategy=megatron"], ["layout.dp=2", "strategy=entrain"]])
def test_losses_are_the_same_whoever_makes_inputs(tmp_path: Path, layout: list[str]) -> None:
    start_server()
    write_pictures(tmp_path / "pictures.parquet", 24, 112, 84, 0)
    trace = tmp_path / "trace.parquet"
    scan = ["trace", f"source.path={tmp_path}/pictures.parquet", f"output={trace}", "tokenizer=bytes"]
    assert run_command([*scan, "model=tiny", "cluster=tiny"]) == 0
    four_ranks = [text for text in SETTING if not text.startswith("workload")]
    data = ["model=tiny", "workload=trace", f"workload.path={trace}", "harness.data=files"]
    found = []
    for mode, processes in (*((mode, "null") for mode in PREPROCESSING), ("processes", "3")):
        modes = [f"harness.preprocessing={mode}", f"harness.preprocessing_processes={processes}"]
        config = compose_cells([*four_ranks, *data, *layout, *modes, "iterations=3"])[0].config
        rows = run_experiment(config).iterations
        found.append([(row["loss"], row["grad_norm"]) for row in rows])
        stalls = np.array([[row["input_stall_s"], row["input_stall_mean_s"]] for row in rows])
        assert (stalls[:, 0] >= stalls[:, 1]).all()
        assert (stalls > 0).all()
    assert len(set(found[0])) == 3
    assert found == [found[0]] * 4


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("number", "to_all"), [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGKILL, False)]
)
def test_a_signal_to_the_command_leaves_no_worker(tmp_path: Path, number: signal.Signals, to_all: bool) -> None:
    run = ["model=tiny", APART, "harness.preprocessing_processes=1", "iterations=500"]
    command = start("-m", "entrain_bench.cli", *TWO_RANKS, *run, f"results_dir={tmp_path}", "mlflow=false")
    # The command, the server that ranks fork from, the tracker of both, two ranks, two workers.
    while processes_of_session(command.pid) < 7:
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
    run = ["harness.preprocessing=processes", "harness.preprocessing_processes=1", "iterations=2"]
    config = compose_cells([*SETTING, *DISJOINT, *run])[0].config
    with watching() as seen:
        assert len(run_experiment(config).iterations) == 2
    assert all(ip_address(address).is_loopback for _, address in seen)
    # The store of this process, and every rank; workers of ranks hold their sockets, too.
    assert len({process for process, _ in seen}) >= 5
    assert not list(temporary.glob("entrain-bench-*"))
