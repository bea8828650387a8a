"""The command: options, steps that fail or were done before, and a whole check on the CPU."""

from __future__ import annotations

import json
import platform
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import Composer
from entrain_bench.config.tree import choices
from entrain_bench.lab.__main__ import main
from entrain_bench.lab.gpu_check import command
from entrain_bench.lab.gpu_check.command import (
    claim,
    origin_of,
    run_sections,
)
from entrain_bench.lab.gpu_check.runs import CORRECTNESS, FAILED, PASSED, SKIPPED, Check, Finding, make_check
from entrain_bench.lab.gpu_check.sections import SECTIONS, Section
from support.cli import asked
from support.gpu_check import check_in, machine


class Counted:
    """A step that counts its calls, and may fail."""

    def __init__(self, finding: Finding | Exception) -> None:
        self.finding, self.calls = finding, 0

    def __call__(self, _: Check) -> Finding:
        self.calls += 1
        if isinstance(self.finding, Exception):
            raise self.finding
        return self.finding


def test_a_step_that_fails_stops_no_other_and_can_be_repeated(tmp_path: Path) -> None:
    counted = {
        "environment": Counted(Finding(PASSED, "fine")),
        "tests": Counted(KeyError("x")),
        "correctness": Counted(UserError("a=1: must be 2")),
        "profile": Counted(Finding(SKIPPED, "no GPU")),
    }
    sections = {name: Section("?", step) for name, step in counted.items()}
    check = check_in(tmp_path)
    results = run_sections(check, [*sections], sections=sections)
    assert [result.finding.verdict for result in results] == [PASSED, FAILED, FAILED, SKIPPED]
    assert "KeyError: 'x'" in results[1].finding.result
    assert results[2].finding.result == "a=1: must be 2"
    report = (tmp_path / "report.md").read_text()
    assert "| throughput | How fast does the 1B model train? | not run |" in report
    assert len(json.loads((tmp_path / "numbers.json").read_text())) == len(sections)
    counted["tests"].finding = Finding(PASSED, "mended")
    (result,) = run_sections(check, ["tests"], sections=sections)
    assert result.finding.verdict == PASSED
    report = (tmp_path / "report.md").read_text()
    assert "mended" in report
    assert "a=1: must be 2" in report
    assert [step.calls for step in counted.values()] == [1, 2, 1, 1]


@pytest.mark.wide
@pytest.mark.parametrize("change", [{"num_devices": 4}, {"everything": True}, {"kind": "cuda"}, {"origin": "there"}])
def test_steps_of_other_devices_or_options_are_not_reported(tmp_path: Path, change: dict[str, Any]) -> None:
    check = check_in(tmp_path)
    other = replace(check, **change, machine=replace(machine(), gpus=[{"name": "A GPU"}]))
    sections = dict.fromkeys(("environment", "tests"), Section("?", Counted(Finding(PASSED, "fine"))))
    run_sections(check, [*sections], sections=sections)
    run_sections(other, ["environment"], sections=sections)
    assert [result["name"] for result in json.loads((tmp_path / "numbers.json").read_text())] == ["environment"]
    assert "| tests | Do the tests that need a GPU pass? | not run |" in (tmp_path / "report.md").read_text()


def test_interrupted_steps_are_not_done(tmp_path: Path) -> None:
    fine = Section("?", Counted(Finding(PASSED, "fine")))

    def interrupt(_: Check) -> Finding:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sections(
            check_in(tmp_path),
            ["environment", "tests"],
            sections={"environment": fine, "tests": Section("?", interrupt)},
        )
    assert [path.name for path in (tmp_path / "sections").iterdir()] == ["environment.json"]


def made(present: int, wanted: int | None) -> Check:
    return make_check(replace(machine(), gpus=[{"name": "A GPU"}] * present), wanted, False, Path(), "here")


@pytest.mark.parametrize(("present", "wanted", "used"), [(3, None, 2), (16, 4, 4), (0, None, 2)])
def test_as_many_devices_as_layouts_are_made_for(present: int, wanted: int | None, used: int) -> None:
    assert made(present, wanted).num_devices == used


@pytest.mark.parametrize(("present", "wanted"), [(2, 4), (8, 3)])
def test_other_numbers_of_devices_are_refused(present: int, wanted: int) -> None:
    with pytest.raises(UserError, match=rf"--devices={wanted}: must be "):
        made(present, wanted)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("kind", "num_devices", "everything"), [("cpu", 2, False), ("cpu", 8, True), ("cuda", 1, False), ("cuda", 8, True)]
)
def test_jobs_are_ones_that_there_are(kind: str, num_devices: int, everything: bool) -> None:
    check = check_in(Path("folder"), kind, num_devices, everything)
    jobs = [[*CORRECTNESS, f"cluster.gpus_per_node={num_devices}"]]
    for plan in (check.fidelity(), check.throughput()):
        jobs += [[*plan.job, *overrides, *check.profiled()] for overrides in plan.workloads.values()]
        assert {*plan.strategies} <= {*choices("strategy")}
    for job in jobs:
        harness = ["harness=train", f"harness.device={kind}", f"harness.num_ranks={num_devices}"]
        given = [*job, *harness, f"harness.dtype={check.dtype}"]
        assert Composer(None).run(given).global_batch % num_devices == 0
    name, request = asked(shlex.join(["profile", *check.profiling()]))
    assert name == "profile"
    assert "model" in {text.partition("=")[0] for text in request.overrides}


# Eleven starts of torch and megatron-core, most of them on two ranks.
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_check_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "check"
    command = ["gpu-check", "--output", str(folder), "--device", "cpu"]
    assert main(command) == 0, capsys.readouterr().out
    results = {result["name"]: result for result in json.loads((folder / "numbers.json").read_text())}
    verdicts = {name: result["finding"]["verdict"] for name, result in results.items()}
    assert verdicts == {
        **dict.fromkeys(SECTIONS, PASSED), "tests": SKIPPED, "throughput": SKIPPED
    }  # fmt: skip
    losses = results["correctness"]["finding"]["tables"]["Losses in float32"]
    assert [row["strategy"] for row in losses] == ["megatron", "entrain", "fsdp"]
    assert all(0 <= row["largest_difference"] <= 1e-5 for row in losses)
    programs = results["fidelity"]["finding"]["tables"]["Iterations"]
    assert len(programs) == 3
    assert all(row["predicted_s"] > 0 < row["measured_s"] for row in programs)
    for name in ("report.md", "numbers.json", "machine.json"):
        text = (folder / name).read_text()
        assert not any(named and named in text for named in (platform.node(), str(Path.cwd()), str(tmp_path.parent)))
    # Records are as they were.
    times = {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("runs/*.json")}
    assert times
    assert main([*command, "--sections", "correctness"]) == 0
    assert times == {path: path.stat().st_mtime_ns for path in times}


def test_bad_options_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu-check", "--sections", "x"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gpu-check: --sections=x: unknown; choices: correctness, environment,")
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert main(["gpu-check", "--output", str(blocked / "inside")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"gpu-check: --output={blocked / 'inside'}: cannot be written to (Not a directory)"


def test_measurements_are_of_a_machine_and_the_code_that_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    check = check_in(Path("here"), "cuda")
    here = origin_of(machine())
    assert origin_of(machine()) == here
    assert origin_of(machine(variables={"NCCL_P2P_DISABLE": "1"})) != here
    busy = machine()
    assert origin_of(replace(busy, host=busy.host | {"load average": "9.0"})) == here
    assert origin_of(replace(busy, host=busy.host | {"torch": "3"})) != here
    assert replace(check, origin="there").profile != check.profile == check.runs / "profile.json"
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
