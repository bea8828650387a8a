"""What ``entrain-bench check`` prints: each bug once, a verdict, and the next command."""

from __future__ import annotations

from functools import partial

import pytest

from entrain_bench.base.errors import require
from entrain_bench.cli import run_command
from entrain_bench.commands import check
from entrain_bench.conformance.suite import VALID, ConformanceTest


def buggy(number: int) -> None:
    raise IndexError(f"index {number} is out of bounds")


def test_a_bug_is_printed_once_before_the_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tests = [
        *(ConformanceTest(VALID, f"run {number}", partial(buggy, number)) for number in range(20)),
        ConformanceTest("repeatable", "a", lambda: require(False, "x", 1, "2")),
        # Another rule, though the same function raises.
        ConformanceTest("repeatable", "b", lambda: require(False, "y", 1, "2")),
        ConformanceTest("imports", "c", lambda: None),
    ]
    monkeypatch.setattr(check, "cases", lambda *_: tests)
    assert run_command(["check", "strategy=megatron", "iterations=2"]) == 1
    lines = capsys.readouterr().out.splitlines()
    bug, first, second, _, verdict, following = lines[-6:]
    assert bug.startswith(f"failed: {VALID}: run 0: ")
    assert bug.endswith("index 0 is out of bounds (and in 19 more tests)")
    assert (first, second) == ("failed: repeatable: a: x=1: must be 2", "failed: repeatable: b: y=1: must be 2")
    assert verdict.startswith("not passed: 22 of 23 tests failed.")
    assert following == "next: entrain-bench check strategy=megatron iterations=2"


def test_a_pass_says_how_to_compare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "cases", lambda *_: [ConformanceTest(VALID, "run", lambda: None)])
    assert run_command(["check", "strategy=lpt"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "passed: no rule is broken in 1 test, so the strategy can be compared",
        "next: entrain-bench --multirun strategy=megatron,lpt workload=chartqa seed=0,1,2",
    ]
