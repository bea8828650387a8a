"""What ends ranks, played and started for real: the first cause in one line, nothing left; and the next run goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_start_method, set_start_method
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from entrain_bench.base.errors import ExecutionError, IncompatibleError, UserError
from entrain_bench.cli import run_command
from entrain_bench.config.schema import RunConfig
from entrain_bench.config.tree import config_tree
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import run_experiment
from entrain_bench.train.launching import first_cause, on_ranks, write_failure
from support.processes import eventually
from support.servers import free_port
from support.train.launched import TWO_RANKS, kill_session, nothing_left, processes_of_session, ranks_started, start
from support.train.ranks import run_ranks, start_server
from support.train.runs import DISJOINT, SETTING, config_to_json, train_here

CLOSED = RuntimeError("Connection closed by peer")


@pytest.mark.parametrize(
    ("exit_codes", "left", "kind", "message"),
    [
        # Its peers lose the connection.
        ({2: -signal.SIGKILL}, {1: CLOSED}, ExecutionError, "rank 2: was killed by SIGKILL"),
        ({1: 3}, {0: CLOSED}, ExecutionError, "rank 1: exited with code 3"),
        ({}, {3: UserError("a=1:\n must be 2"), 0: CLOSED}, UserError, "a=1: must be 2"),
        ({}, {1: IncompatibleError("no"), 0: CLOSED}, IncompatibleError, "no"),
        ({}, {1: ExecutionError("loss=nan"), 0: CLOSED}, ExecutionError, "loss=nan"),
        ({}, {0: KeyError("x"), 1: CLOSED}, ExecutionError, "rank 0: KeyError: 'x'"),
        ({}, {1: torch.OutOfMemoryError("CUDA")}, ExecutionError, "rank 1: OutOfMemoryError: CUDA"),
        (
            {1: -signal.SIGABRT},
            {},
            ExecutionError,
            "rank 1: aborted (SIGABRT); NCCL does so when it waited longer than harness.timeout_s=120",
        ),
    ],
)
def test_the_first_cause_travels_to_the_launcher(
    tmp_path: Path, exit_codes: Mapping[int, int], left: dict[int, Exception], kind: type[Exception], message: str
) -> None:
    for rank, error in left.items():
        write_failure(tmp_path, rank, error)
    first = first_cause(tmp_path, exit_codes, 120.0)
    assert (type(first), str(first)) == (kind, message)


def test_what_a_dead_rank_printed_is_kept(tmp_path: Path) -> None:
    logs = tmp_path / "torch" / "attempt_0" / "1"
    logs.mkdir(parents=True)
    (logs / "stderr.log").write_text("Watchdog caught collective operation timeout")
    error = first_cause(tmp_path, {1: -signal.SIGABRT}, None)
    assert str(error) == "rank 1: was killed by SIGABRT"
    assert str(error.__cause__) == "last output of rank 1:\nWatchdog caught collective operation timeout"


def troubled(what: str, *overrides: str) -> RunConfig:
    """Two ranks of which the first gets into trouble while the other waits."""
    config = compose_cells([*TWO_RANKS, *overrides])[0].config
    planner = {"_target_": "support.train.trouble.Troubled", "what": what}
    return replace(config, strategy={**config.strategy, "planner": planner})


@pytest.mark.wide
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("raise", "^rank 0: KeyError: 'x'$"),
        ("exit", "^rank 0: exited with code 3$"),
        ("abort", "^rank 0: was killed by SIGABRT$"),
        ("sleep", r"^rank \d: waited longer than harness.planning_timeout_s=3 s for another rank \("),
    ],
)
def test_a_rank_in_trouble_ends_all(temporary: Path, what: str, message: str) -> None:
    # Below its line an error may have a traceback.
    with pytest.raises(ExecutionError, match=f"(?m){message}"):
        run_experiment(troubled(what, "harness.planning_timeout_s=3"))
    assert nothing_left(temporary)


@pytest.mark.wide
def test_ranks_start_from_a_joblib_worker(temporary: Path) -> None:
    # What joblib's workers do; ranks know nothing of it.
    import joblib.externals.loky.backend.context  # noqa: F401

    before = get_start_method(allow_none=True)
    set_start_method("loky", force=True)
    try:
        with pytest.raises(ExecutionError, match=r"(?m)^rank 0: KeyError: 'x'$"):
            run_experiment(troubled("raise"))
        assert get_start_method() == "loky"
    finally:
        set_start_method(before, force=True)
    assert nothing_left(temporary)


@pytest.mark.wide
def test_a_signal_ends_all(temporary: Path) -> None:
    assert threading.current_thread() is threading.main_thread()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    for number, kind in ((signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)):
        with interrupted(number, temporary), pytest.raises(kind) as ended:
            run_experiment(troubled("sleep"))
        assert nothing_left(temporary)
        if kind is SystemExit:
            assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@contextmanager
def interrupted(number: signal.Signals, folder: Path) -> Iterator[None]:
    """Send this process a signal once all ranks run, if they come to that."""
    over = threading.Event()

    def send() -> None:
        while not over.wait(0.01):
            if len(list(folder.glob("entrain-bench-*/*/attempt_0/*/stderr.log"))) == 2:
                os.kill(os.getpid(), number)
                return

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    try:
        yield
    finally:
        over.set()
        sender.join()


# --- In processes of their own: each imports torch and megatron-core.

# Options of the planner that another one takes the place of.
OPTIONS = [*yaml.safe_load((config_tree() / "strategy" / "planner" / "megatron.yaml").read_text())][1:]
SLEEPING = (
    f"--config-dir={Path(__file__).parents[2]}",
    "strategy.planner._target_=support.train.trouble.Troubled",
    "+strategy.planner.what=sleep",
    *(f"~strategy.planner.{name}" for name in OPTIONS),
)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("number", "to_all", "num_processes", "exit_code", "printed"),
    [
        (signal.SIGKILL, False, 0, -signal.SIGKILL, ""),
        (signal.SIGKILL, False, 3, -signal.SIGKILL, ""),
        # The command, the server its ranks fork from, the tracker of both; and the ranks.
        (signal.SIGINT, True, 3, 130, "interrupted; finished parts are kept\n"),
        (signal.SIGINT, True, 5, 130, "interrupted; finished parts are kept\n"),
        (signal.SIGTERM, True, 5, 143, ""),
        (signal.SIGKILL, False, 5, -signal.SIGKILL, ""),
    ],
)
def test_a_signal_to_the_command_leaves_nothing(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    number: signal.Signals,
    to_all: bool,
    num_processes: int,
    exit_code: int,
    printed: str,
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    options = [*TWO_RANKS, *SLEEPING, f"results_dir={tmp_path}", "mlflow=false"]
    command = start("-m", "entrain_bench.cli", *options, TMPDIR=str(temporary))
    # Nothing of a test that fails, either.
    request.addfinalizer(lambda: kill_session(command.pid))
    while processes_of_session(command.pid) < num_processes or not list(temporary.glob("entrain-bench-*")):
        assert command.poll() is None
        time.sleep(0.01)
    # Until the server imports, or ranks wait for each other; or at once, when there is no more than the folder.
    time.sleep(2 if num_processes else 0)
    (os.killpg if to_all else os.kill)(command.pid, number)
    assert command.communicate()[1] == printed
    assert command.returncode == exit_code
    # A server ends once it has imported.
    assert eventually(lambda: not processes_of_session(command.pid), 120)
    assert eventually(lambda: not list(temporary.glob("entrain-bench-*")))


def torchrun(folder: Path, num_nodes: int, num_local: int, port: int, *overrides: str) -> subprocess.Popen[str]:
    """One of ``num_nodes`` agents, all on this machine."""
    agents = [f"--nnodes={num_nodes}", f"--nproc-per-node={num_local}", "--rdzv-backend=c10d", "--rdzv-id=test"]
    run = ("-m", "entrain_bench.cli", *TWO_RANKS, *overrides, "iterations=1", f"results_dir={folder}", "mlflow=false")
    return start("-m", "torch.distributed.run", *agents, f"--rdzv-endpoint=127.0.0.1:{port}", *run)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_torchrun_starts_ranks_here_and_on_several_machines(tmp_path: Path) -> None:
    port = free_port()
    agents = [torchrun(tmp_path, 2, 1, port) for _ in range(2)]
    said = [agent.communicate()[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    (record,) = (tmp_path / "runs").rglob("*.json")
    assert json.loads(record.read_text())["status"] == "ok"
    waiting = torchrun(tmp_path, 1, 2, port, *SLEEPING, "harness.planning_timeout_s=5")
    lines = [line for line in waiting.communicate()[1].splitlines() if line.startswith("entrain-bench:")]
    assert waiting.returncode == 1
    assert "waited longer than harness.planning_timeout_s=5 s for another" in lines[0]
    assert processes_of_session(waiting.pid) == 0


def _losses(_: int, config: str) -> list[float]:
    return [row["loss"] for row in train_here(config)]


def run_killed(command: list[str], checkpoints: Path) -> int:
    """The exit code of a run whose third rank is killed once there is a checkpoint."""

    def kill() -> None:
        assert eventually(lambda: any(checkpoints.glob("iteration_*/meta.json")), 120)
        # Ranks are forked in turn.
        os.kill(ranks_started()[2], signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    return run_command(command)


# Two starts of four ranks, each of which imports torch and megatron-core.
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_rank_ends_the_run_and_the_next_one_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Enough iterations that one is running when the signal arrives.
    overrides = [*SETTING, *DISJOINT, "distributed_optimizer=true", "iterations=8"]
    checkpoints = tmp_path / "checkpoints"
    stored = [f"harness.checkpoint_dir={checkpoints}", "harness.checkpoint_every=2"]
    command = [*overrides, *stored, f"results_dir={tmp_path}/results", "mlflow=false"]
    before = signal.getsignal(signal.SIGTERM)
    assert run_killed(command, checkpoints) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "entrain-bench: rank 2: was killed by SIGKILL"
    assert not ranks_started()
    assert signal.getsignal(signal.SIGTERM) is before
    assert 2 <= len(json.loads(next(checkpoints.glob("*/meta.json")).read_text())["history"]) < 8
    assert run_command(command) == 0
    (record,) = (tmp_path / "results" / "runs").rglob("*.json")
    resumed = [row["loss"] for row in json.loads(record.read_text())["iterations"]]
    whole = config_to_json(compose_cells(overrides)[0].config)
    assert resumed == run_ranks(_losses, 4, whole)[0]


def summed(number: int, fails: bool, group: dist.ProcessGroup) -> dict[str, Any]:
    if fails and group.rank() == 1:
        raise UserError("a=1: must be 2")
    total = torch.tensor([number + group.rank()])
    dist.all_reduce(total, group=group)
    return {"total": int(total), "rank": group.rank()}


@pytest.mark.wide
def test_every_rank_returns_its_result() -> None:
    start_server()
    assert on_ranks(summed, 2, 10, False) == [{"total": 21, "rank": rank} for rank in (0, 1)]
