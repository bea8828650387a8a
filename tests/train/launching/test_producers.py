"""Producers of a run, started for real: the same losses, one line for whatever ends them, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import pytest

from entrain_bench.base.errors import ExecutionError, UserError
from entrain_bench.cli import run_command
from entrain_bench.lab.preprocessing import write_pictures
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare, run_experiment
from entrain_bench.train.launching.failures import first_cause, output_path
from entrain_bench.train.launching.producers import num_producers
from entrain_bench.train.settings import PREPROCESSING, TrainSettings
from support.datasets import image_bytes, write_finevision
from support.train.launched import TWO_RANKS, free_port, nothing_left, processes_of_session, start, torchrun
from support.train.ranks import start_server
from support.train.runs import SETTING

APART = "harness.preprocessing=processes"


def settings_of(*overrides: str) -> TrainSettings:
    executor = prepare(compose_cells([*TWO_RANKS, *overrides])[0].config).executor
    assert isinstance(executor, TrainSettings)
    return executor


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["harness.preprocessing=threads"], r"harness.preprocessing=threads: unknown \(did you mean thread\?\)"),
        ([APART, "harness.preprocessing_processes=0"], "harness.preprocessing_processes=0: must be at least 1"),
        (
            ["harness.preprocessing_processes=2"],
            "harness.preprocessing_processes=2: must be null unless harness.preprocessing=processes",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        settings_of(*overrides)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("cores", "num_ranks", "producers"), [(2, 2, 1), (2, 4, 1), (8, 4, 4), (12, 4, 8), (128, 8, 16), (1, 1, 1)]
)
def test_producers_take_the_cores_that_ranks_leave(
    monkeypatch: pytest.MonkeyPatch, cores: int, num_ranks: int, producers: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert num_producers(settings_of(APART), num_ranks) == producers
    assert num_producers(settings_of(APART, "harness.preprocessing_processes=3"), num_ranks) == 3
    assert num_producers(settings_of(), num_ranks) == 0


def test_memory_that_is_shared_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(UserError, match=r"^harness.preprocessing=processes: requires Linux \(shared memory\). On"):
        num_producers(settings_of(APART), 2)


def test_a_dead_producer_comes_before_those_that_lost_it(tmp_path: Path) -> None:
    output_path(tmp_path, 1, "producer").write_text("its stack")
    gone = {0: None, 1: -signal.SIGSEGV}
    error = first_cause(tmp_path, {0: 1, 1: -signal.SIGABRT}, 9.0, uses_nccl=False, producers=gone)
    assert str(error) == "producer 1: was killed by SIGSEGV"
    assert str(error.__cause__) == "last output of producer 1:\nits stack"


def killed(name: str, folder: Path) -> threading.Event:
    """Have a process of the run killed once an iteration is done; set when that has happened."""
    done = threading.Event()

    def kill() -> None:
        while not done.wait(0.01):
            processes = [process.pid for process in active_children() if process.name.startswith(name)]
            if processes and list(folder.glob("entrain-bench-*/progress")):
                os.kill(max(pid for pid in processes if pid), signal.SIGKILL)
                done.set()

    threading.Thread(target=kill, daemon=True).start()
    return done


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "message"),
    [("producer-", "^producer 0: was killed by SIGKILL$"), ("ForkServerProcess", r"^rank \d: was killed by SIGKILL$")],
)
def test_a_killed_producer_or_rank_ends_the_run(temporary: Path, name: str, message: str) -> None:
    config = compose_cells([*TWO_RANKS, "model=tiny", APART, "iterations=500"])[0].config
    done = killed(name, temporary)
    with pytest.raises(ExecutionError, match=message):
        run_experiment(config)
    assert done.is_set()
    assert nothing_left(temporary)


# --- Over pictures that are decoded; each run takes seconds to start.

FOUR_RANKS = [text for text in SETTING if not text.startswith("workload")]


def scanned(folder: Path, pictures: Path) -> list[str]:
    """Overrides of a run over a scanned file."""
    trace = folder / "trace.parquet"
    command = ["trace", f"source.path={pictures}", f"output={trace}", "tokenizer=bytes", "model=tiny", "cluster=tiny"]
    assert run_command(command) == 0
    return ["model=tiny", "workload=trace", f"workload.path={trace}", "harness.data=files"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", [["layout.tp=2", "strategy=megatron"], ["layout.dp=2", "strategy=entrain"]])
def test_losses_are_the_same_whoever_makes_inputs(tmp_path: Path, layout: list[str]) -> None:
    start_server()
    write_pictures(tmp_path / "pictures.parquet", 24, 112, 84, 0)
    data = scanned(tmp_path, tmp_path / "pictures.parquet")
    found = []
    for mode, processes in (*((mode, "null") for mode in PREPROCESSING), ("processes", "3")):
        modes = [f"harness.preprocessing={mode}", f"harness.preprocessing_processes={processes}"]
        config = compose_cells([*FOUR_RANKS, *data, *layout, *modes, "iterations=3"])[0].config
        rows = run_experiment(config).iterations
        found.append([(row["loss"], row["grad_norm"]) for row in rows])
        stalls = np.array([[row["input_stall_s"], row["input_stall_mean_s"]] for row in rows])
        assert (stalls[:, 0] >= stalls[:, 1]).all()
        assert (stalls > 0).all()
    assert len(set(found[0])) == 3
    assert found == [found[0]] * 4


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", PREPROCESSING)
def test_a_bad_sample_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str) -> None:
    start_server()
    # Its header is whole, so that it is in the trace.
    cut = image_bytes(640, 480)[:-200]
    write_finevision(tmp_path / "pictures.parquet", [([cut], ["what is it?"])] * 4)
    data = scanned(tmp_path, tmp_path / "pictures.parquet")
    ranks = [text for text in TWO_RANKS if not text.startswith("workload")]
    capsys.readouterr()
    assert run_command([*ranks, *data, f"harness.preprocessing={mode}", f"results_dir={tmp_path}", "mlflow=false"]) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("entrain-bench:"))
    assert "sample pictures.parquet:" in line
    assert not active_children()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("number", "to_all"), [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGKILL, False)]
)
def test_a_signal_to_the_command_leaves_no_producer(tmp_path: Path, number: signal.Signals, to_all: bool) -> None:
    shared = {path.name for path in Path("/dev/shm").iterdir()}  # noqa: S108
    run = ["model=tiny", APART, "harness.preprocessing_processes=2", "iterations=500"]
    command = start("-m", "entrain_bench.cli", *TWO_RANKS, *run, f"results_dir={tmp_path}", "mlflow=false")
    # The command, the server that the others fork from, the tracker of both, two ranks, two producers.
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
    left = {path.name for path in Path("/dev/shm").iterdir()} - shared  # noqa: S108
    assert not [name for name in left if "entrain" in name]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_has_producers_on_each_machine(tmp_path: Path) -> None:
    port = free_port()
    agents = [torchrun(tmp_path, 2, 1, port, "model=tiny", APART) for _ in range(2)]
    said = [agent.communicate()[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    (record,) = (tmp_path / "runs").rglob("*.json")
    values = json.loads(record.read_text())
    assert values["status"] == "ok"
    assert values["metrics"]["input_stall_s"] > 0
    assert [processes_of_session(agent.pid) for agent in agents] == [0, 0]
