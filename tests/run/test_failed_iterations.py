"""Iterations that do not fit memory: the run ends, or goes on and is not compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import OutOfMemoryError
from entrain_bench.program import Program
from entrain_bench.records.records import Record, Results
from entrain_bench.run.cells import compose_cells, run_one
from entrain_bench.simulate import Simulator

JOB = "strategy=megatron model=tiny cluster=tiny global_batch=8 microbatch_size=1 layout.tp=1 layout.dp=2 iterations=4"


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, misfits: set[int], on_oom: str) -> Record:
    """Run four iterations, of which the ``misfits`` do not fit."""
    check = Simulator.check_memory
    done = 0

    def checked(simulator: Simulator, program: Program) -> FloatArray:
        nonlocal done
        done += 1
        if done - 1 in misfits:
            raise OutOfMemoryError("memory: too much")
        return check(simulator, program)

    monkeypatch.setattr(Simulator, "check_memory", checked)
    (cell,) = compose_cells([*JOB.split(), "workload=chartqa", f"on_oom={on_oom}"])
    return run_one(cell, Results(folder))


def test_failed_iterations_are_counted_and_the_run_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tmp_path / "whole", monkeypatch, set(), "count")
    part = run(tmp_path / "part", monkeypatch, {0, 2}, "count")
    assert (whole.status, whole.metrics["failed_iterations"], len(whole.iterations)) == ("ok", 0.0, 4)
    assert (part.status, part.row["failed_iterations"], part.settled) == ("failed", 0.5, True)
    assert part.reason == "memory: 2 of 4 iterations need more than a rank has (on_oom=count)"
    times = [[row["iteration_time_s"] for row in record.iterations] for record in (whole, part)]
    assert times[1] == times[0][1::2]
    # Records with failed iterations are read again with their numbers.
    assert Results(tmp_path / "part").records() == [part]


@pytest.mark.parametrize(("misfits", "on_oom"), [({2}, "fail"), ({0, 1, 2, 3}, "count")])
def test_a_run_fails_that_may_not_go_on_or_has_no_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, misfits: set[int], on_oom: str
) -> None:
    with pytest.raises(OutOfMemoryError, match="too much"):
        run(tmp_path, monkeypatch, misfits, on_oom)
