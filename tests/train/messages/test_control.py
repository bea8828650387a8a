"""Waits that take too long name the setting that limits them."""

from __future__ import annotations

import pytest

from entrain_bench.base.errors import ExecutionError
from entrain_bench.train.messages.control import named_wait


@pytest.mark.parametrize(
    ("raised", "line"),
    [
        (
            RuntimeError("[gloo/buffer.cc:81] Timed out waiting 3000ms\nfor recv operation"),
            "rank 0: waited longer than harness.timeout_s=3 s for another rank ([gloo/buffer.cc:81] Timed out waiting "
            "3000ms for recv operation)",
        ),
        (RuntimeError("Connection closed by peer"), "Connection closed by peer"),
        (ExecutionError("rank 1: timed out"), "rank 1: timed out"),
    ],
)
def test_waits_that_are_too_long_are_named(raised: Exception, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RuntimeError) as error, named_wait("harness.timeout_s", 3.0):
        raise raised
    assert str(error.value) == line
    assert isinstance(error.value, ExecutionError) == ("rank" in line)
