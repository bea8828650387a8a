"""What is left of a sweep whose workers die, whose disk is full, or that is interrupted: all that had finished."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from entrain_bench.base import files
from entrain_bench.base.errors import UnwritableError
from entrain_bench.cli import run_command
from entrain_bench.commands import run as run_module
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results, new_record
from entrain_bench.run import cells as run_cells_module
from entrain_bench.run.cells import Done, compose_cells, run_cells
from entrain_bench.run.parallel import Died
from support.made_up import finished

SMALL = ["model=tiny", "cluster=tiny", "global_batch=16", "microbatch_size=2", "layout.tp=1", "layout.dp=2"]
SWEEP = [*SMALL, "iterations=1", "mlflow=false", "--multirun", "seed=0,1"]


def statuses(folder: Path) -> list[str]:
    return pd.read_csv(folder / "table.csv").sort_values("seed")["status"].tolist()


@pytest.fixture
def cell() -> Cell:
    (cell,) = compose_cells([*SMALL, "iterations=1"])
    return cell


@pytest.fixture
def deadly(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(_: object, cells: Iterable[Cell], *__: object) -> Iterator[tuple[Cell, Died]]:
        yield from ((cell, Died()) for cell in cells)

    monkeypatch.setattr("entrain_bench.run.cells.run_parallel", die)


@pytest.mark.usefixtures("deadly")
def test_a_cell_that_killed_two_processes_is_left_alone_unless_failed_ones_are_to_run(
    cell: Cell, tmp_path: Path
) -> None:
    results = Results(tmp_path)
    left_alone = []
    for deaths in (1, 2, 3):
        (done,) = run_cells([cell], results, 1, retry_failed=deaths == 3)
        assert done.record == results.read(cell.key)
        assert done.record
        assert done.record.deaths == deaths
        assert (done.record.status, done.record.reason) == ("failed", str(Died()))
        assert not done.record.finished
        left_alone.append([results.kept(cell, retry_failed) is not None for retry_failed in (False, True)])
    assert left_alone == [[False, False], [True, False], [True, False]]
    # Another failure in between, and they are counted anew.
    results.write(new_record(cell, "failed", "told so"), None)
    assert not results.kept(cell)


@pytest.mark.usefixtures("deadly")
def test_a_process_that_dies_after_its_record_was_written_costs_nothing(
    cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = Results(tmp_path)
    record = finished(cell)
    real = run_cells_module.run_parallel

    def write_and_die(*arguments: Any) -> Iterator[tuple[Cell, Died]]:
        for dead in real(*arguments):
            results.write(record, None)
            yield dead

    monkeypatch.setattr(run_cells_module, "run_parallel", write_and_die)
    assert [done.record for done in run_cells([cell], results, 1)] == [record]
    assert results.read(cell.key) == record


def test_failed_cells_that_are_results_are_run_again_on_request(tmp_path: Path) -> None:
    sweep = [*SWEEP, f"results_dir={tmp_path}", "memory_fraction=0.00001"]
    times = []
    for retry in ([], [], ["retry=failed"]):
        assert run_command([*sweep, *retry]) == 1
        times.append([path.stat().st_mtime_ns for path in sorted((tmp_path / "runs").rglob("*.json"))])
    assert times[0] == times[1]
    assert all(before < after for before, after in zip(times[1], times[2], strict=True))


def stop_after_first(
    error: BaseException,
) -> Callable[..., Iterator[Done]]:
    def cells_then_error(cells: Iterable[Cell], results: Results, *_: Any, **__: Any) -> Iterator[Done]:
        yield next(iter(run_cells(cells, results)))
        raise error

    return cells_then_error


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyboardInterrupt(), 130, "interrupted; finished parts are kept"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "No space left on device"),
        (UnwritableError("results_dir=x: cannot be written to"), 2, "results_dir=x: cannot be written to"),
    ],
)
def test_what_had_finished_when_a_sweep_was_stopped_is_published(
    error: BaseException,
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run_module, "run_cells", stop_after_first(error))
    assert run_command([*SWEEP, f"results_dir={tmp_path}"]) == code
    shown = capsys.readouterr()
    assert statuses(tmp_path) == ["ok"]
    assert "s/iter" in shown.out
    assert "1 of 2 planned runs left no record" in shown.out
    progress, *lines = shown.err.splitlines()
    assert progress.startswith("[1/2]")
    assert any(says in line for line in lines)


@pytest.mark.wide
def test_figures_that_are_stopped_leave_their_runs_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logged: list[int] = []
    monkeypatch.setattr("entrain_bench.run.study.run_cells", stop_after_first(KeyboardInterrupt()))
    cells = compose_cells([*SMALL, "iterations=1", "seed=0,1"], multirun=True)
    monkeypatch.setattr("entrain_bench.run.study.Study.cells", lambda *_: cells)
    monkeypatch.setattr("entrain_bench.commands.outputs.posterior_sweeps", lambda _: ())
    monkeypatch.setattr("entrain_bench.commands.outputs.num_processes", lambda: 0)
    monkeypatch.setattr(
        "entrain_bench.commands.outputs.log_to_mlflow", lambda _, found, *__: logged.append(len(found)) or True
    )
    assert run_command(["figures", "where_time_goes", f"results_dir={tmp_path}"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted; finished parts are kept"
    assert statuses(tmp_path) == ["ok"]
    # Nobody waits for MLflow then: the next time makes up for it.
    assert logged == []
    assert (tmp_path / "mlflow.pending").exists()
    (tmp_path / "mlflow.db").touch()
    monkeypatch.setattr("entrain_bench.run.study.run_cells", run_cells)
    for _ in range(2):
        assert run_command(["figures", "where_time_goes", f"results_dir={tmp_path}"]) == 0
        assert logged == [2]
        assert not (tmp_path / "mlflow.pending").exists()


@pytest.mark.wide
def test_a_full_disk_costs_what_it_has_no_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sync, full = os.fsync, set[str]()

    def fsync(number: int) -> None:
        name = Path(f"/proc/self/fd/{number}").readlink().name
        if any(word in name for word in full):
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(number)

    monkeypatch.setattr(files.os, "fsync", fsync)
    full |= {".table.csv."}
    assert run_command([*SWEEP, f"results_dir={tmp_path}"]) == 0
    shown = capsys.readouterr()
    assert "s/iter" in shown.out
    lines = shown.err.splitlines()
    assert any(line.endswith(f"No space left on device: '{tmp_path / 'table.csv'}')") for line in lines)
    assert not any(line.startswith("written: ") and "table.csv" in line for line in lines)
    # And no room for the third run, whose trace would come after it: no other is tried.
    full |= {".json."}
    assert run_command([*SWEEP, "seed=0,1,2,3,4", f"results_dir={tmp_path}"]) == 2
    shown = capsys.readouterr()
    assert "s/iter" in shown.out
    assert "3 of 5 planned runs left no record" in " ".join(shown.out.split())
    assert shown.err.splitlines()[-1].startswith(f"entrain-bench: results_dir={tmp_path}: cannot be written to (")
    assert "internal error" not in shown.err
    assert not [path for path in tmp_path.rglob(".*") if path.is_file()]
