"""What ends ranks, in one line: what they leave, and what of it came first."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from entrain_bench.base.errors import ExecutionError, IncompatibleError, UserError
from entrain_bench.train.launching.worker import (
    first_cause,
    read_failures,
    show_life,
    sign_of_life,
    silent_rank,
    write_failure,
)
from entrain_bench.train.messages.control import WaitError
from support.processes import eventually

NUM_RANKS = 4


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (UserError("a=1:\n must be 2"), UserError, r"^a=1: must be 2$"),
        (IncompatibleError("no"), IncompatibleError, "^no$"),
        (ExecutionError("loss=nan"), ExecutionError, "^loss=nan$"),
        (KeyError("x"), ExecutionError, "^rank 1: KeyError: 'x'$"),
        (torch.OutOfMemoryError("CUDA"), ExecutionError, "^rank 1: OutOfMemoryError: CUDA$"),
    ],
)
def test_failures_travel_to_the_launcher(tmp_path: Path, error: Exception, kind: type[Exception], message: str) -> None:
    write_failure(tmp_path, 1, error)
    write_failure(tmp_path, 0, RuntimeError("Connection closed by peer"))
    first = next(iter(read_failures(tmp_path).values())).as_error()
    assert type(first) is kind
    with pytest.raises(kind, match=message):
        raise first


@pytest.mark.parametrize(
    ("exit_codes", "left", "message"),
    [
        # Its peers lose the connection.
        ({2: -signal.SIGKILL}, {1: RuntimeError("closed")}, "rank 2: was killed by SIGKILL"),
        ({1: 3}, {0: RuntimeError("closed")}, "rank 1: exited with code 3"),
        ({}, {0: KeyError("x")}, "rank 0: KeyError: 'x'"),
        ({}, {3: UserError("a=1: must be 2"), 0: RuntimeError("closed")}, "a=1: must be 2"),
        (
            {1: -signal.SIGABRT},
            {},
            "rank 1: aborted (SIGABRT); NCCL does so when it waited longer than harness.timeout_s=120",
        ),
    ],
)
def test_the_first_cause_is_named(
    tmp_path: Path, exit_codes: Mapping[int, int], left: dict[int, Exception], message: str
) -> None:
    show_all(tmp_path)
    for rank, error in left.items():
        write_failure(tmp_path, rank, error)
    assert str(first_cause(tmp_path, NUM_RANKS, exit_codes, 120.0, uses_nccl=True)) == message


def show_all(work: Path) -> None:
    for rank in range(NUM_RANKS):
        sign_of_life(work, rank).touch()


def test_what_a_dead_rank_printed_is_kept(tmp_path: Path) -> None:
    logs = tmp_path / "torch" / "attempt_0" / "1"
    logs.mkdir(parents=True)
    (logs / "stderr.log").write_text("Watchdog caught collective operation timeout")
    error = first_cause(tmp_path, NUM_RANKS, {1: -signal.SIGABRT}, 120.0, uses_nccl=False)
    assert str(error) == "rank 1: was killed by SIGABRT"
    assert str(error.__cause__) == "last output of rank 1:\nWatchdog caught collective operation timeout"


WAITED = WaitError("rank 0: waited longer than harness.timeout_s=10 s for another rank (Timed out)", 10.0)
SILENT = "rank 2: did not respond for 9 s (stopped or hung); "


@pytest.mark.parametrize(
    ("exit_codes", "left", "silent_s", "message"),
    [
        ({}, WAITED, 9.0, f"{SILENT}{WAITED}"),
        # Alive: it waits, too.
        ({}, WAITED, 1.5, str(WAITED)),
        # Nobody waited: the error is the cause, whoever is silent.
        ({}, ExecutionError("loss=nan"), 9.0, "loss=nan"),
        (
            {0: -signal.SIGABRT},
            None,
            9.0,
            f"{SILENT}rank 0: aborted (SIGABRT); NCCL does so when it waited longer than harness.timeout_s=10",
        ),
        ({0: -signal.SIGKILL}, None, 9.0, "rank 0: was killed by SIGKILL"),
    ],
)
def test_a_silent_rank_is_named_if_another_waited_in_vain(
    tmp_path: Path, exit_codes: Mapping[int, int], left: Exception | None, silent_s: float, message: str
) -> None:
    show_all(tmp_path)
    then = time.time() - silent_s
    os.utime(sign_of_life(tmp_path, 2), (then, then))
    if left:
        write_failure(tmp_path, 0, left)
    assert str(first_cause(tmp_path, NUM_RANKS, exit_codes, 10.0, uses_nccl=True)) == message


def test_life_is_shown_as_long_as_the_launcher_looks(tmp_path: Path) -> None:
    sign = sign_of_life(tmp_path, 3)
    sign.touch()
    os.utime(sign, (0, 0))
    assert silent_rank(tmp_path, [3], 5.0, time.time()) is not None
    show_life(tmp_path, 3)
    assert eventually(lambda: silent_rank(tmp_path, [3], 5.0, time.time()) is None, 10.0)
    threads = [thread for thread in threading.enumerate() if thread.name == "show-life"]
    sign.unlink()
    assert eventually(lambda: not any(thread.is_alive() for thread in threads), 10.0)
    assert not sign.exists()
    assert silent_rank(tmp_path, [], 5.0, time.time()) is None
