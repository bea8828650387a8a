"""The check: options, runs by device, verdicts of sections, and a whole check on the CPU."""

from __future__ import annotations

import json
import math
import platform
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import Composer
from entrain_bench.config.tree import choices
from entrain_bench.lab.__main__ import main
from entrain_bench.lab.gpu_check import command, sections
from entrain_bench.lab.gpu_check.command import SectionResult, claim, make_check, origin_of, page, run_sections
from entrain_bench.lab.gpu_check.sections import (
    CORRECTNESS,
    FAILED,
    PASSED,
    SECTIONS,
    SKIPPED,
    Check,
    Finding,
    Section,
    correctness,
    environment,
    fidelity,
    gpu_tests,
    judge_correctness,
    judge_losses,
    judge_tests,
    profile,
    throughput,
    verdict_of,
)
from entrain_bench.records import keys
from entrain_bench.records.records import Record, Results
from entrain_bench.run.cells import compose_cells
from support.cli import asked
from support.gpu_check import check_in, machine
from support.made_up import finished


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


HANGS = "took longer than 9 s"


class Played:
    """Processes that leave a record of each of their cells, as the command does: none twice.

    Attributes:
        status: of records; empty leaves none.
        lost: strategies that leave none.
        started: how many there were.
    """

    def __init__(self) -> None:
        self.status, self.lost, self.started = "ok", set[str](), 0

    def __call__(self, arguments: Sequence[str], log: Path, *_: object) -> str:
        self.started += 1
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("its last line\n")
        if not self.status:
            return HANGS
        given = [*arguments[3:]]
        (root,) = (text.partition("=")[2] for text in given if text.startswith("results_dir="))
        results = Results(Path(root))
        for cell in compose_cells(given, multirun=True):
            if cell.config.strategy["name"] not in self.lost and not results.kept(cell):
                results.write(finished(cell, self.status, "as told"), None)
        return "exit code 1" if self.status == "failed" or self.lost else ""


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    processes = Played()
    monkeypatch.setattr(sections, "run_python", processes)
    return processes


def train_here(folder: Path, num_devices: int) -> Record:
    job = [*CORRECTNESS, f"cluster.gpus_per_node={num_devices}"]
    return check_in(folder, "cpu", num_devices).train("all", "megatron", "megatron", job, num_devices, 9.0)


def ranks(run: Record) -> int:
    return int(run.config["harness"]["num_ranks"])


def test_the_record_of_other_devices_is_none_of_a_run_that_hangs(tmp_path: Path, played: Played) -> None:
    assert ranks(train_here(tmp_path, 2)) == 2
    played.status = ""
    assert train_here(tmp_path, 4).reason == f"{HANGS} (its last line)"


@pytest.mark.wide
@pytest.mark.usefixtures("played")
def test_a_finished_run_has_its_own_record_though_others_are_newer(tmp_path: Path) -> None:
    assert [ranks(train_here(tmp_path, num_devices)) for num_devices in (2, 4, 2, 4)] == [2, 4, 2, 4]


def test_the_record_of_other_code_is_none(tmp_path: Path, played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks(train_here(tmp_path, 2)) == 2
    monkeypatch.setattr(keys, "code_version", lambda _: "other code")
    played.status = ""
    assert train_here(tmp_path, 2).reason == f"{HANGS} (its last line)"


def test_a_failure_before_is_not_why_a_run_has_failed_now(tmp_path: Path, played: Played) -> None:
    played.status = "failed"
    assert train_here(tmp_path, 2).reason == "as told"
    played.status = ""
    assert train_here(tmp_path, 2).reason == f"{HANGS} (its last line)"


def test_predictions_are_known_by_their_strategies(tmp_path: Path, played: Played) -> None:
    played.lost = {"fsdp"}
    job = [*CORRECTNESS, "cluster.gpus_per_node=2"]
    found = check_in(tmp_path).predict("all", job, ["megatron", "fsdp", "entrain"])
    assert found["fsdp"].reason == "exit code 1 (its last line)"
    own = {name: run.labels["strategy"] for name, run in found.items() if run.status == "ok"}
    assert own == {"megatron": "megatron", "entrain": "entrain"}


def test_what_cannot_be_composed_is_said_and_not_run(tmp_path: Path, played: Played) -> None:
    found = check_in(tmp_path).train("all", "megatron", "megatron", ["global_batchh=1"], 2, 9.0)
    assert "global_batchh" in found.reason
    assert played.started == 0


SKIP = "SKIPPED [2] tests/train/test_gpu.py:20: needs a CUDA device"
BAD = "FAILED tests/train/test_gpu.py::test_x - assert 1 == 2"


@pytest.mark.parametrize(
    ("lines", "wrong", "verdict", "result"),
    [
        (["..", SKIP, "2 passed, 2 skipped in 3.1s"], "", PASSED, "2 passed, 2 skipped in 3.1s"),
        ([SKIP, "2 skipped in 0.1s"], "", SKIPPED, "2 skipped in 0.1s"),
        (["F.", BAD, "1 failed, 1 passed in 9s"], "exit code 1", FAILED, "exit code 1 (1 failed, 1 passed in 9s)"),
        # Ended before it was through.
        (["$ python -m pytest"], "took longer than 900 s", FAILED, "took longer than 900 s ($ python -m pytest)"),
    ],
)
def test_the_output_of_pytest_is_read(lines: list[str], wrong: str, verdict: str, result: str) -> None:
    found = judge_tests("\n".join([*lines, ""]), wrong)
    assert (found.verdict, found.result) == (verdict, result)
    if BAD in lines:
        assert found.tables["Tests"] == [{"verdict": "failed", "test": BAD.removeprefix("FAILED ")}]


def test_a_wrong_loss_fails_the_check() -> None:
    good = judge_losses("megatron", [7.0, 6.0], [7.0, 6.0], 1e-5)
    bad = judge_losses("entrain", [7.0, 6.01], [7.0, 6.0], 1e-5)
    left_out = {"strategy": "dflop", "verdict": SKIPPED, "reason": "layout"}
    found = judge_correctness({"float32": [good, bad, left_out]})
    assert (found.verdict, found.result) == (
        FAILED,
        "1 of 2 runs equal; not: entrain; 1 have no layout for this number of devices",
    )
    found = judge_correctness({"float32": [good, left_out], "bfloat16": []})
    assert found.verdict == PASSED
    assert "1e-05 in float32, 0.0005 in bfloat16" in found.result
    assert judge_correctness({"float32": [left_out]}).verdict == FAILED


def test_a_run_that_fails_fails_the_section() -> None:
    misfit = {"workload": "coco", "strategy": "dflop", "verdict": SKIPPED, "reason": "layout: too small"}
    crash = {"workload": "coco", "strategy": "dip", "verdict": FAILED, "reason": "rank 1: was killed by SIGKILL"}
    assert verdict_of([misfit], 2, "fast", {}) == Finding(PASSED, "2 runs: fast; 1 do not fit these devices")
    assert verdict_of([misfit], 0, "", {}) == Finding(FAILED, "no run fits: layout: too small")
    found = verdict_of([misfit, crash], 2, "fast", {})
    assert found.verdict == FAILED
    assert found.result.startswith("1 failed, dip first (rank 1: was killed by SIGKILL); 2 runs: fast;")


def predict(*_: object) -> dict[str, Record]:
    """Of three strategies one is planned wrong, two do not fit."""
    wrong, misfit = (Record("", status, "why", {}, {}, "") for status in ("failed", "skipped"))
    return {"megatron": wrong, "entrain": misfit, "fsdp": replace(wrong, settled=True)}


def train(*_: object) -> Record:
    return Record("", "ok", "", {}, {}, "", iterations=({"loss": 7.0},))


def test_plans_that_failed_are_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Check, "predict", predict)
    monkeypatch.setattr(Check, "train", train)
    found = correctness(check_in(tmp_path))
    assert found.tables["Losses in float32"] == [
        {"strategy": "megatron", "verdict": FAILED, "reason": "why"},
        {"strategy": "entrain", "verdict": SKIPPED, "reason": "why"},
        {"strategy": "fsdp", "verdict": SKIPPED, "reason": "why"},
    ]
    assert found.result == "0 of 1 runs equal; not: megatron; 2 have no layout for this number of devices"


def test_gpus_that_torch_does_not_see_are_a_failure(tmp_path: Path) -> None:
    listed = "index, name\n0, NVIDIA H100\n1, NVIDIA H100"
    unseen = replace(check_in(tmp_path), machine=machine(nvidia_smi=listed))
    assert environment(unseen).result == "the driver lists 2 GPUs, torch sees 0"
    hidden = replace(unseen, machine=machine(nvidia_smi=listed, variables={"CUDA_VISIBLE_DEVICES": ""}))
    assert environment(hidden).verdict == PASSED


def test_what_cannot_be_done_is_skipped_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Check, "gpu_tests", [])
    assert gpu_tests(check_in(tmp_path)).verdict == SKIPPED
    assert throughput(check_in(tmp_path)).result.startswith("needs a GPU")
    for section in (fidelity, throughput):
        found = section(check_in(tmp_path, "cuda"))
        assert (found.verdict, found.result) == (SKIPPED, "there is no profile: see the section profile")


def test_a_process_that_fails_is_named_with_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Sequence[str], log: Path, *__: object) -> str:
        log.write_text("one line\nentrain-bench: tp=3: must divide\n\n")
        return "exit code 2"

    monkeypatch.setattr(sections, "run_python", fail)
    found = profile(check_in(tmp_path))
    assert found == Finding(FAILED, "exit code 2 (entrain-bench: tp=3: must divide); a second call resumes")


REFERENCE = [7.0, 6.5, 6.0]


@pytest.mark.parametrize(
    ("losses", "verdict", "difference"),
    [
        ([7.0, 6.5, 6.0], PASSED, 0.0),
        ([7.0, 6.5, 6.0006], PASSED, 1e-4),
        # A planted error in one step.
        ([7.0, 6.5065, 6.0], FAILED, 1e-3),
        ([7.0, 6.5, math.nan], FAILED, math.nan),
        ([7.0, 6.5, math.inf], FAILED, math.nan),
        ([7.0, 6.5], FAILED, math.nan),
        ([], FAILED, math.nan),
    ],
)
def test_a_loss_that_differs_is_found(losses: list[float], verdict: str, difference: float) -> None:
    row = judge_losses("entrain", losses, REFERENCE, 2e-4)
    assert row["verdict"] == verdict
    assert row["largest_difference"] == pytest.approx(difference, rel=1e-6, abs=1e-12, nan_ok=True)


def test_the_first_table_has_all_verdicts_and_every_row_is_shown() -> None:
    losses = [
        {"strategy": "megatron", "last_loss": 6.123456789, "verdict": PASSED},
        {"strategy": "dip", "verdict": FAILED, "reason": "rank 1: a | b"},
    ]
    finding = Finding(FAILED, "1 of 2 equal", {"Losses": losses, "Empty": []}, {"nvidia-smi": "GPU0 X"})
    lines = page("Check", "make gpu-check", [SectionResult("correctness", "", finding, 61.4)], SECTIONS).splitlines()
    assert lines[:3] == ["# Check", "", "| section | question | verdict | result | seconds |"]
    assert [line.split(" | ")[2] for line in lines[4:10]] == ["failed", *["not run"] * 5]
    assert {"| megatron | 6.123457 | passed |  |", "| dip |  | failed | rank 1: a \\| b |", "GPU0 X"} <= {*lines}
    assert "**Empty**" not in lines
