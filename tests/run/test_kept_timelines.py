"""Which runs keep their timelines: those that somebody reads, also if that turns out later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from entrain_bench.answers.tables import run_actions
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import MEASURED, Record, Results, new_record
from entrain_bench.run.cells import Done, attempt
from entrain_bench.run.study import Output, Study, bring_up_to_date, by_strategy
from support.made_up import finished

JOB = ("model=tiny", "cluster=tiny", "global_batch=16", "microbatch_size=2", "layout.tp=1", "layout.dp=2")
SWEEP = ("strategy=megatron,entrain", "workload=coco,chartqa", "seed=0,1", "iterations=1", *JOB)


def made(root: Path, reads: bool, sweep: Sequence[str] = SWEEP) -> list[Done]:
    study, done = Study(Results(root)), list[Done]()

    def groups(study: Study) -> list[list[Cell]]:
        return by_strategy(study.cells(*sweep)) if reads else []

    output = Output("any", [tuple(sweep)], lambda _: "", timelines=groups)
    assert [problem for _, problem in bring_up_to_date([output], study, 0, lambda one, _: done.append(one))] == [""]
    return done


def kept(root: Path) -> set[tuple[str, str, int]]:
    """Strategy, workload and seed of the runs with timelines; the records agree with the files."""
    results = Results(root)
    records = results.records()
    assert all((record.timeline is True) == results.timeline_path(record.key).exists() for record in records)
    labels = [record.labels for record in records if record.timeline]
    return {(each["strategy"], each["workload"], each["seed"]) for each in labels}


@pytest.mark.wide
def test_a_sweep_keeps_the_timelines_of_one_job_and_those_that_its_output_reads(tmp_path: Path) -> None:
    assert len(made(tmp_path / "unread", reads=False)) == 8
    assert kept(tmp_path / "unread") == {(strategy, "chartqa", 0) for strategy in ("megatron", "entrain")}
    made(tmp_path / "read", reads=True)
    first = {(strategy, workload, 0) for strategy in ("megatron", "entrain") for workload in ("coco", "chartqa")}
    assert kept(tmp_path / "read") == first


@pytest.mark.wide
def test_a_timeline_that_is_wanted_later_is_made_by_the_same_run(tmp_path: Path) -> None:
    made(tmp_path, reads=False)
    before = {record.key: record for record in Results(tmp_path).records()}
    again = made(tmp_path, reads=True)
    assert {(done.cell.config.workload["name"], done.cell.config.seed) for done in again} == {("coco", 0)}
    for done in again:
        assert done.record
        kept_as = {"timeline": True, "timeline_sha256": done.record.timeline_sha256}
        assert done.record == replace(before[done.cell.key], **kept_as), "host times, too, are those of the first"
    assert made(tmp_path, reads=True) == []
    study = Study(Results(tmp_path))
    assert {*run_actions(study.cells(*SWEEP), study.results)["workload"]} == {"coco", "chartqa"}
    # A file that is gone is made again.
    study.results.timeline_path(again[0].cell.key).unlink()
    assert [done.cell.key for done in made(tmp_path, reads=True)] == [again[0].cell.key]


def test_a_run_that_comes_out_otherwise_replaces_its_record(tmp_path: Path) -> None:
    (done, *_) = made(tmp_path, reads=False, sweep=["strategy=megatron", "seed=1,2", "iterations=1", *JOB])
    assert done.record
    results, cell = Results(tmp_path), replace(done.cell, timeline=True)
    other = {**done.record.metrics, "iteration_time_s": 1.0}
    results.write(replace(done.record, metrics=other), None)
    again = attempt(cell, results).record
    assert again
    assert again.computed == done.record.computed
    walls = {name: again.metrics[name] for name in MEASURED if name != "planning_time_s"}
    results.write(replace(done.record, metrics={**done.record.metrics, **dict.fromkeys(walls, 9.0)}), None)
    kept_record = attempt(cell, results).record
    assert kept_record
    assert kept_record.metrics["assignment_time_s"] == 9.0


def test_where_the_first_run_has_none_the_next_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep, asked = ["strategy=megatron", "workload=coco,chartqa", "seed=0,1,2", "iterations=1", *JOB], list[int]()

    def fail_first(cell: Cell, *_: object, **__: object) -> tuple[Record, None]:
        asked.append(cell.config.seed) if cell.timeline else None
        if cell.config.seed == 0:
            return new_record(cell, "failed", "told so", settled=True), None
        # A program that is too large has a result and no timeline.
        return replace(finished(cell), timeline=False if cell.timeline else None), None

    monkeypatch.setattr("entrain_bench.run.cells.run_or_explain", fail_first)
    done = made(tmp_path, reads=True, sweep=sweep)
    assert asked == [0, 0, 1, 1, 2, 2]
    assert len(done) == 10
    assert made(tmp_path, reads=True, sweep=sweep) == []
