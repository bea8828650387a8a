"""Processes that end, fail, hang, and leave others behind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from entrain_bench.lab import measuring
from entrain_bench.lab.measuring import WARM_UPS, last_line, run_python, time_calls
from support.processes import eventually, runs

HANG = """
import os, pathlib, signal, sys, time
if os.fork():
    pathlib.Path(sys.argv[1]).write_text("there")
else:
    pathlib.Path(sys.argv[2]).write_text(str(os.getpid()))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("print('hello')", ""),
        ("import sys; sys.exit(3)", "exit code 3"),
        ("import os; os.abort()", "was killed by SIGABRT"),
    ],
)
def test_how_a_process_ended_is_told(tmp_path: Path, code: str, wrong: str) -> None:
    assert run_python(["-c", code], tmp_path / "logs" / "x.log", 60.0, {}) == wrong


def test_what_it_printed_and_its_command_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    code = "import os, sys; print(os.environ['MINE']); print('last', file=sys.stderr); print()"
    for value in ("one", "two"):
        assert run_python(["-c", code], log, 60.0, {"MINE": value}) == ""
    # Both streams in one file, in whatever order they were written.
    lines = [line for line in log.read_text().splitlines() if line]
    assert lines[0].startswith("$ python -c import os")
    assert sorted(lines[1:3]) == ["last", "one"]
    assert sorted(lines[4:]) == ["last", "two"]
    assert last_line(log) in ("last", "two")
    assert last_line(tmp_path / "none.log") == ""


@pytest.mark.wide
def test_a_process_that_hangs_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "END_S", 0.2)
    began, child = tmp_path / "began", tmp_path / "child"
    started = time.monotonic()
    wrong = run_python(["-c", HANG, str(began), str(child)], tmp_path / "x.log", 3.0, {})
    assert wrong == "took longer than 3 s"
    assert time.monotonic() - started < 20
    assert began.read_text() == "there"
    assert eventually(lambda: not runs(int(child.read_text())), 10.0)


def test_warm_ups_are_not_timed_and_long_calls_are_repeated_less(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    assert len(time_calls(seen.append, repeats=4)) == 4
    assert seen == list(range(WARM_UPS + 4))
    monkeypatch.setattr(measuring, "LONG_S", 0.0)
    assert len(time_calls(lambda _: None, repeats=20)) == 3
