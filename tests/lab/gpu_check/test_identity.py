"""What makes results those of another check, and what does not; whose folder a check may use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.lab.__main__ import main
from entrain_bench.lab.gpu_check import command
from entrain_bench.lab.gpu_check.command import claim, origin_of
from entrain_bench.lab.gpu_check.settings import Setup
from support.gpu_check import machine

SETUP = Setup("cuda", 2, False, Path("here"), "origin")


def test_measurements_are_of_a_machine_and_the_code_that_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    here = origin_of(machine())
    assert origin_of(machine()) == here
    assert origin_of(machine(variables={"NCCL_P2P_DISABLE": "1"})) != here
    busy = machine()
    assert origin_of(replace(busy, host=busy.host | {"load average": "9.0"})) == here
    assert origin_of(replace(busy, host=busy.host | {"torch": "3"})) != here
    assert replace(SETUP, origin="there").profile != SETUP.profile == SETUP.runs / "profile.json"
    monkeypatch.setattr(command, "hash_of", lambda _: "other code")
    assert origin_of(machine()) != here


def test_a_folder_of_something_else_is_refused_and_stays_unmodified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    notes = Path("notes")
    notes.mkdir()
    (notes / "today.md").write_text("mine")
    assert main(["gpu-check", "--output", "notes", "--device", "cpu", "--sections", "environment"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "gpu-check: --output=notes: must be a new or empty folder, or the folder of an earlier check"
    assert [path.name for path in notes.iterdir()] == ["today.md"]


def test_new_and_empty_folders_belong_to_the_check_from_then_on(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "a" / "new"):
        claim(folder)
        (folder / "report.md").write_text("x")
        claim(folder)
    with pytest.raises(UserError):
        claim(tmp_path)
