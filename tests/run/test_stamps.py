"""Outputs that are written again, because what they are made of or their files changed, and those that are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from entrain_bench.records.code import Source
from entrain_bench.records.records import METRICS, Results, new_record
from entrain_bench.run import study as stamps
from entrain_bench.run.study import Output, Study, bring_up_to_date

SWEEP = ("model=tiny", "cluster=tiny", "workload=theirs", "seed=0,1")


class Folder:
    """A folder of results, one of the user's, and how often its output was written."""

    def __init__(self, root: Path) -> None:
        self.results, self.mine, self.written, self.problem = Results(root / "results"), root / "mine", 0, ""
        self.yaml = self.mine / "workload" / "theirs.yaml"
        self.yaml.parent.mkdir(parents=True)
        self.yaml.write_text("defaults: [uniform_mix, _self_]\nname: theirs\nlabel: Theirs\n")
        self.file = self.results.root / "figures" / "some.txt"
        self.output = Output("some", [SWEEP], self.write, ["figures/some.txt"])
        for cell in Study(self.results, str(self.mine)).cells(*SWEEP):
            metrics = dict.fromkeys(METRICS, 1.0)
            self.results.write(replace(new_record(cell, "ok"), metrics=metrics), None)

    def write(self, study: Study) -> str:
        self.written += 1
        self.file.parent.mkdir(exist_ok=True)
        records = filter(None, (study.results.read(cell.key) for cell in study.cells(*SWEEP)))
        self.file.write_text(" ".join(str(record.metrics["mfu"]) for record in records))
        return self.problem

    def times_written(self, output: Output | None = None) -> int:
        before, study = self.written, Study(Results(self.results.root), str(self.mine))
        ((_, problem),) = bring_up_to_date([output or self.output], study, 0, lambda *_: None)
        assert problem == self.problem
        return self.written - before


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    found = Folder(tmp_path)
    assert [found.times_written(), found.times_written()] == [1, 0]
    return found


def change_record(folder: Folder) -> None:
    record = folder.results.records()[0]
    folder.results.write(replace(record, metrics={**record.metrics, "mfu": 0.5}), None)


@pytest.mark.wide
@pytest.mark.parametrize(
    "change",
    [
        lambda folder: folder.file.unlink(),
        lambda folder: folder.file.write_text("by hand"),
        # In no key, and shown by figures.
        lambda folder: folder.yaml.write_text(folder.yaml.read_text().replace("Theirs", "Called otherwise")),
        lambda folder: (folder.results.root / "stamps" / "some.json").write_text("{"),
        change_record,
    ],
    ids=["deleted", "edited", "yaml", "damaged stamp", "record"],
)
def test_what_changes_has_it_written_again_once(folder: Folder, change: Callable[[Folder], object]) -> None:
    change(folder)
    assert [folder.times_written(), folder.times_written()] == [1, 0]
    assert "by hand" not in folder.file.read_text()


@pytest.mark.wide
def test_changed_code_has_it_written_again(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    found = stamps.sources_of({"entrain_bench.figures.iteration_time"})
    assert {"entrain_bench.figures._style", "entrain_bench.answers.tables"} <= found.keys()
    name, original = "entrain_bench.base.arrays", stamps.sources_of

    def changed(modules: set[str]) -> dict[str, Source]:
        known = original(modules)
        return {**known, name: replace(known[name], meaning="otherwise")} if name in known else known

    with monkeypatch.context() as patch:
        patch.setattr(stamps, "sources_of", changed)
        assert [folder.times_written(), folder.times_written()] == [1, 0]
    assert folder.times_written() == 1


@pytest.mark.wide
def test_what_is_incomplete_or_of_unknown_code_is_always_written(folder: Folder) -> None:
    folder.problem = "something is missing"
    folder.file.unlink()
    assert [folder.times_written(), folder.times_written()] == [1, 1]
    folder.problem = ""
    theirs = replace(folder.output, module="entrain_bench.figures._theirs_mine")
    assert [folder.times_written(theirs), folder.times_written(theirs)] == [1, 1]
    without_files = replace(folder.output, committed=[])
    assert [folder.times_written(without_files), folder.times_written(without_files)] == [1, 1]
