"""What the benchmark measures, and how processes end, fail, hang, and leave others behind; no test asserts a time."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from entrain_bench.lab import bench, measuring
from entrain_bench.lab.__main__ import main
from entrain_bench.lab.bench import CASES, TINY, WARM_UPS, median_s, parts
from entrain_bench.lab.measuring import last_line, run_python
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


def test_warm_ups_are_not_timed() -> None:
    clock = iter([0, 100] * WARM_UPS + [0, 1, 0, 2, 0, 3])
    assert median_s(lambda: None, repeats=3, timer=lambda: next(clock)) == 2


SMALL = ("model=tiny", "cluster=a40x16", "global_batch=32", "microbatch_size=4", "layout.dp=2")


def test_every_part_of_a_run_is_measured() -> None:
    (megatron, first), (entrain, second) = parts(["megatron", "entrain"], SMALL, repeats=3)
    assert (megatron, entrain) == ("megatron", "entrain")
    for values in (first, second):
        assert all(values[name] > 0 for name in ("plan_s", "assign_s", "schedule_s", "execute_s", "iteration_time_s"))


def test_a_case_that_fails_is_named_and_the_others_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(name: str) -> dict[str, dict[str, float]]:
        if name == "sweep":
            raise RuntimeError("out of luck")
        return {"first": {"assign_s": 0.5}}

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))
    assert main(["bench", "parts_64_gpu"]) == 2
    assert "did you mean parts_64_gpus or " in capsys.readouterr().err
    assert main(["bench", "--results-dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "sweep: failed: RuntimeError: out of luck\n"
    written = json.loads((tmp_path / "bench.json").read_text())
    assert written["machine"]["python"]
    assert set(written["cases"]) == set(CASES) - {"sweep"}
    assert written["cases"]["parts_64_gpus"]["measures"] == {"first": {"assign_s": 0.5}}


@pytest.mark.wide
def test_sweeps_and_their_memory_are_measured() -> None:
    (_, run), (label, memory) = bench.sweep(5, TINY)
    assert run["experiment_s"] > 0
    assert label == "memory_5_runs"
    assert memory["growth"] >= 0
