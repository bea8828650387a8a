"""What ends ranks, in one line: what they leave, and what of it came first."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from entrain_bench.base.errors import ExecutionError, IncompatibleError, UserError
from entrain_bench.train.launching import (
    first_cause,
    read_failures,
    write_failure,
)


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
    for rank, error in left.items():
        write_failure(tmp_path, rank, error)
    assert str(first_cause(tmp_path, exit_codes, 120.0)) == message


def test_what_a_dead_rank_printed_is_kept(tmp_path: Path) -> None:
    logs = tmp_path / "torch" / "attempt_0" / "1"
    logs.mkdir(parents=True)
    (logs / "stderr.log").write_text("Watchdog caught collective operation timeout")
    error = first_cause(tmp_path, {1: -signal.SIGABRT}, None)
    assert str(error) == "rank 1: was killed by SIGABRT"
    assert str(error.__cause__) == "last output of rank 1:\nWatchdog caught collective operation timeout"
