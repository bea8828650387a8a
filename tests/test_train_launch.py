"""What ends ranks; and ranks started for real: one is killed, and the next run goes on where it was."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from test_train_errors import DISJOINT, train_here
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from train_parity import SETTING
from train_ranks import run_ranks

from entrain_bench.cli import run_command
from entrain_bench.compose import compose_cells
from entrain_bench.errors import UserError
from entrain_bench.train.handover import config_to_json, write_failure
from entrain_bench.train.launch import first_cause


@pytest.mark.parametrize(
    ("exit_codes", "left", "message"),
    [
        # Its peers lose the connection before the agent notices the kill.
        ({1: -signal.SIGTERM, 2: -signal.SIGKILL}, {1: RuntimeError("closed")}, "rank 2: was killed by SIGKILL"),
        ({0: 1, 1: -signal.SIGTERM}, {0: KeyError("x")}, "rank 0: KeyError: 'x'"),
        ({0: 1, 3: 1}, {3: UserError("a=1: must be 2"), 0: RuntimeError("closed")}, "a=1: must be 2"),
        ({0: 3}, {}, "rank 0: exited with code 3"),
    ],
)
def test_the_first_cause_is_named(
    tmp_path: Path, exit_codes: dict[int, int], left: dict[int, Exception], message: str
) -> None:
    for rank, error in left.items():
        write_failure(tmp_path, rank, error)
    failures = {rank: ProcessFailure(rank, 1, code, str(tmp_path / "none")) for rank, code in exit_codes.items()}
    assert str(first_cause(tmp_path, ChildFailedError("worker", failures))) == message


def workers() -> list[int]:
    """Processes of this one that are ranks."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == os.getpid() and b"entrain_bench.train.worker" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return sorted(found)


def kill_after_checkpoint(folder: Path) -> None:
    while not list(folder.glob("iteration_*/meta.json")):
        time.sleep(0.01)
    os.kill(workers()[2], signal.SIGKILL)


def _losses(_: int, config: str) -> list[float]:
    return [row["loss"] for row in train_here(config)]


def run_killed(command: list[str], checkpoints: Path) -> int:
    """The exit code of a run whose third rank is killed once there is a checkpoint."""
    killer = threading.Thread(target=kill_after_checkpoint, args=(checkpoints,), daemon=True)
    killer.start()
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
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("entrain-bench:")]
    assert lines == ["entrain-bench: rank 2: was killed by SIGKILL"]
    assert workers() == []
    assert signal.getsignal(signal.SIGTERM) is before
    assert 2 <= len(json.loads(next(checkpoints.glob("*/meta.json")).read_text())["history"]) < 8
    assert run_command(command) == 0
    (record,) = (tmp_path / "results" / "runs").glob("*.json")
    resumed = [row["loss"] for row in json.loads(record.read_text())["iterations"]]
    whole = config_to_json(compose_cells(overrides)[0].config)
    assert resumed == run_ranks(_losses, 4, whole)[0]
