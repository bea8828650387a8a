"""Figures and documents brought up to date: cells run once, outputs written as soon as theirs have run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from entrain_bench.answers.tables import run_table
from entrain_bench.base.errors import OutOfMemoryError, UserError
from entrain_bench.cli import run_command
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Record, Results, new_record
from entrain_bench.run import study as study_module
from entrain_bench.run.cells import Done, compose_cells, is_settled
from entrain_bench.run.study import Output, Study, bring_up_to_date
from support.made_up import finished

TINY = ("model=tiny", "cluster=tiny", "global_batch=16", "microbatch_size=2", "layout.tp=1", "layout.dp=2")


@pytest.fixture(scope="module")
def two_cells() -> list[Cell]:
    return compose_cells(["strategy=megatron,entrain", "iterations=1", *TINY], multirun=True)


@pytest.fixture
def study(two_cells: list[Cell], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    monkeypatch.setattr(Study, "cells", lambda *_: two_cells)
    return Study(Results(tmp_path))


@pytest.mark.parametrize(
    ("statuses", "problem"),
    [
        (["ok", "ok"], ""),
        (["ok", "skipped"], ""),
        (["ok", "settled"], ""),
        (["ok", "failed"], "1 of 2 runs have no result: told so"),
        (["missing", "missing"], "2 of 2 runs have no result: not run"),
    ],
)
def test_what_is_wrong_with_a_sweep(study: Study, two_cells: list[Cell], statuses: list[str], problem: str) -> None:
    for cell, status in zip(two_cells, statuses, strict=True):
        if status == "settled":
            study.results.write(new_record(cell, "failed", "told so", settled=True), None)
        elif status != "missing":
            study.results.write(finished(cell, status), None)
    assert study.problem("figure=any") == problem
    shown = ["failed" if status == "settled" else status for status in statuses]
    assert run_table(two_cells, study.results)["status"].tolist() == shown


def test_only_what_does_not_fit_simulated_memory_is_a_result(two_cells: list[Cell]) -> None:
    (training,) = compose_cells(["harness=train", *TINY])
    assert is_settled(two_cells[0], OutOfMemoryError("told so"))
    assert not is_settled(two_cells[0], UserError("told so"))
    assert not is_settled(training, OutOfMemoryError("told so"))


@pytest.mark.wide
def test_cells_run_once_and_outputs_are_written_when_theirs_have_run(tmp_path: Path) -> None:
    study, order = Study(Results(tmp_path)), list[str]()

    def output(name: str, *sweeps: tuple[str, ...]) -> Output:
        return Output(name, sweeps, lambda study: order.append(name) or study.problem(*sweeps[0]) if sweeps else "")

    one, both = ((f"strategy={names}", "iterations=1", *TINY) for names in ("megatron", "megatron,entrain"))
    outputs = [output("both", both), output("one", one), output("none")]
    seen: list[tuple[Done, int]] = []
    written = [(o.name, problem) for o, problem in bring_up_to_date(outputs, study, 0, lambda *c: seen.append(c))]
    assert [(done.cell.overrides[0], total) for done, total in seen] == [
        ("strategy=megatron", 2),
        ("strategy=entrain", 2),
    ]
    assert written == [("none", ""), ("one", ""), ("both", "")]
    # Nothing is left to run.
    again = bring_up_to_date(outputs, Study(Results(tmp_path)), 1, lambda *c: seen.append(c))
    assert [o.name for o, _ in again] == ["both", "one", "none"]
    assert len(seen) == 2


@pytest.mark.wide
def test_the_command_reports_missing_data_with_exit_code_1(
    study: Study, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(cells: Any, results: Results, *_: Any, **__: Any) -> Iterator[Done]:
        for cell in cells:
            record: Record = new_record(cell, "failed", "told so")
            results.write(record, None)
            yield Done(cell, record, "", 0.0)

    monkeypatch.setattr(study_module, "run_cells", fail)
    monkeypatch.setattr("entrain_bench.commands.outputs.log_to_mlflow", lambda *_: None)
    root = study.results.root
    assert run_command(["figures", "iteration_time", "schedule_gantt", f"results_dir={root}"]) == 1
    said = capsys.readouterr().err
    assert "iteration_time: incomplete: 2 of 2 runs have no result: told so" in said
    assert "schedule_gantt: incomplete: figure=schedule_gantt: no run of the sweep has a timeline" in said
    assert sorted(path.name for path in (root / "figures").iterdir()) == [
        f"{name}.{suffix}" for name in ("iteration_time", "schedule_gantt") for suffix in ("csv", "json", "pdf", "png")
    ]
