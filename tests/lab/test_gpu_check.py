"""The check: options, runs by device, verdicts of sections, and a whole check on the CPU."""

from __future__ import annotations

import json
import math
import platform
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import Composer
from entrain_bench.config.tree import choices
from entrain_bench.lab import gpu_check, measuring
from entrain_bench.lab.__main__ import main
from entrain_bench.lab.fidelity import STRATEGIES
from entrain_bench.lab.gpu_check import (
    ALONE,
    CORRECTNESS,
    CPU_WORKLOADS,
    FAILED,
    GPU_WORKLOADS,
    PASSED,
    REFERENCE,
    SECTIONS,
    SKIPPED,
    Check,
    Finding,
    Section,
    claim,
    correctness,
    environment,
    fidelity,
    judge_losses,
    judge_runs,
    make_check,
    origin_of,
    page,
    profile,
    run_sections,
)
from entrain_bench.records import keys
from entrain_bench.records.records import Record, Results
from entrain_bench.run.cells import compose_cells
from support.cli import asked
from support.gpu_check import check_in, machine
from support.made_up import finished

FINE = Section("?", lambda _: Finding(PASSED, "fine"))


def failing(error: BaseException) -> Section:
    def fail(_: Check) -> Finding:
        raise error

    return Section("?", fail)


def test_a_step_that_fails_stops_no_other_and_can_be_repeated(tmp_path: Path) -> None:
    check = check_in(tmp_path)
    steps = {"environment": FINE, "fidelity": failing(KeyError("x")), "profile": failing(UserError("a=1: must be 2"))}
    findings = run_sections(check, steps)
    assert [finding.verdict for finding in findings] == [PASSED, FAILED, FAILED]
    assert "KeyError: 'x'" in findings[1].result
    assert findings[2].result == "a=1: must be 2"
    (finding,) = run_sections(check, {"fidelity": FINE})
    assert finding.verdict == PASSED
    report = (tmp_path / "report.md").read_text()
    assert "KeyError" not in report
    assert "a=1: must be 2" in report


def test_steps_of_other_devices_are_not_reported_and_interrupted_ones_are_not_done(tmp_path: Path) -> None:
    check = check_in(tmp_path)
    run_sections(check, {"environment": FINE, "profile": FINE})
    with pytest.raises(KeyboardInterrupt):
        run_sections(replace(check, origin="there"), {"environment": FINE, "fidelity": failing(KeyboardInterrupt())})
    assert [result["name"] for result in json.loads((tmp_path / "numbers.json").read_text())] == ["environment"]
    assert f"| profile | {SECTIONS['profile'].question} | not run |" in (tmp_path / "report.md").read_text()


def test_as_many_devices_as_layouts_are_made_for_and_no_others() -> None:
    def made(present: int, wanted: int | None) -> int:
        return make_check(machine(present), wanted, Path()).num_devices

    assert [made(3, None), made(16, 4), made(0, None)] == [2, 4, 2]
    for present, wanted in ((2, 4), (8, 3)):
        with pytest.raises(UserError, match=rf"--devices={wanted}: must be "):
            made(present, wanted)


@pytest.mark.wide
@pytest.mark.parametrize(("kind", "num_devices"), [("cpu", 2), ("cpu", 8), ("cuda", 1), ("cuda", 8)])
def test_jobs_are_ones_that_there_are(kind: str, num_devices: int) -> None:
    check = check_in(Path("folder"), kind, num_devices)
    workloads = (GPU_WORKLOADS if kind == "cuda" else CPU_WORKLOADS).values()
    jobs = [[*check.job, *overrides] for overrides in workloads]
    for job in ([*CORRECTNESS, f"cluster.gpus_per_node={num_devices}"], *jobs):
        harness = ["harness=train", f"harness.device={kind}", f"harness.num_ranks={num_devices}"]
        assert Composer(None).run([*job, *harness]).global_batch % num_devices == 0
    assert {*STRATEGIES, *ALONE} <= {*choices("strategy")}
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
    verdicts = {name: result["verdict"] for name, result in results.items()}
    assert verdicts == dict.fromkeys(SECTIONS, PASSED)
    losses = results["correctness"]["tables"]["Losses"]
    assert [row["strategy"] for row in losses] == ["megatron", "entrain", "fsdp"]
    assert all(0 <= row["largest_difference"] <= 1e-5 for row in losses)
    programs = results["fidelity"]["tables"]["Iterations"]
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
    here = origin_of(machine(), 2)
    assert origin_of(machine(), 2) == here != origin_of(machine(), 4)
    assert origin_of(machine(variables={"NCCL_P2P_DISABLE": "1"}), 2) != here
    busy = machine()
    assert origin_of(replace(busy, host=busy.host | {"load average": "9.0"}), 2) == here
    assert origin_of(replace(busy, host=busy.host | {"torch": "3"}), 2) != here
    assert replace(check, origin="there").profile != check.profile
    monkeypatch.setattr(gpu_check, "hash_of", lambda _: "other code")
    assert origin_of(machine(), 2) != here


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
    # New and empty folders belong to the check from then on.
    for folder in (tmp_path / "empty", tmp_path / "a" / "new"):
        claim(folder)
        (folder / "report.md").write_text("x")
        claim(folder)


HANGS = "took longer than 9 s"


class Played:
    """Processes that leave a record of each of their cells (none without ``status``, or of ``lost`` strategies)."""

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
    monkeypatch.setattr(measuring, "run_python", processes)
    return processes


def train_here(folder: Path, num_devices: int) -> Record:
    check = check_in(folder, "cpu", num_devices)
    job = [*CORRECTNESS, f"cluster.gpus_per_node={num_devices}", *check.training(num_devices, "float32")]
    return check.run("all", "megatron", ["megatron"], job, 9.0)["megatron"]


def test_what_an_earlier_process_left_is_not_the_result_of_one_that_hangs(
    tmp_path: Path, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = f"{HANGS} (its last line)"
    assert train_here(tmp_path, 2).config["harness"]["num_ranks"] == 2
    played.status = "failed"
    assert train_here(tmp_path, 4).reason == "as told"
    # A record of other devices, and a failure before.
    played.status = ""
    assert train_here(tmp_path, 4).reason == hung
    # A finished run has its own record though others are newer.
    assert train_here(tmp_path, 2).config["harness"]["num_ranks"] == 2
    monkeypatch.setattr(keys, "code_version", lambda _: "other code")
    assert train_here(tmp_path, 2).reason == hung


def test_predictions_are_known_by_their_strategies(tmp_path: Path, played: Played) -> None:
    played.lost = {"fsdp"}
    job = [*CORRECTNESS, "cluster.gpus_per_node=2"]
    found = check_in(tmp_path).run("all", "predicted", ["megatron", "fsdp", "entrain"], job, 9.0)
    assert found["fsdp"].reason == "exit code 1 (its last line)"
    own = {name: run.labels["strategy"] for name, run in found.items() if run.status == "ok"}
    assert own == {"megatron": "megatron", "entrain": "entrain"}
    # What cannot be composed is said and not run.
    found = check_in(tmp_path).run("other", "megatron", ["megatron"], ["global_batchh=1"], 9.0)
    assert "global_batchh" in found["megatron"].reason
    assert played.started == 1


def test_a_run_that_fails_fails_the_section() -> None:
    good = {"strategy": "entrain", "verdict": PASSED}
    misfit = {"strategy": "dflop", "verdict": SKIPPED, "reason": "layout: too small"}
    crash = {"strategy": "dip", "verdict": FAILED, "reason": "rank 1: was killed by SIGKILL"}
    assert judge_runs([good, misfit], "fast", {}) == Finding(PASSED, "1 runs: fast; 1 do not fit these devices")
    assert judge_runs([misfit], "", {}) == Finding(FAILED, "no run fits: layout: too small")
    found = judge_runs([good, misfit, crash], "fast", {})
    assert found.verdict == FAILED
    assert found.result.startswith("1 failed, dip first (rank 1: was killed by SIGKILL); 1 runs: fast;")


def run_with(*losses: float) -> Record:
    return Record("", "ok", "", {}, {}, "", iterations=tuple({"loss": loss} for loss in losses))


def test_plans_that_failed_are_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of three strategies one is planned wrong, two do not fit.
    wrong, misfit = (Record("", status, "why", {}, {}, "") for status in ("failed", "skipped"))
    plans = {"megatron": wrong, "entrain": misfit, "fsdp": replace(wrong, settled=True)}
    monkeypatch.setattr(Check, "run", lambda *given: plans if "predicted" in given else {REFERENCE: run_with(7.0)})
    found = correctness(check_in(tmp_path))
    verdicts = {row["strategy"]: row["verdict"] for row in found.tables["Losses"]}
    assert verdicts == {"megatron": FAILED, "entrain": SKIPPED, "fsdp": SKIPPED}
    assert found.result.startswith("1 failed, megatron first (why); 0 runs")


def test_gpus_that_torch_does_not_see_are_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "run_python", lambda _, log, *__: str(log.write_text("PyTorch version: 2")))
    monkeypatch.setattr(gpu_check.shutil, "which", lambda _: "nvidia-smi")
    assert environment(check_in(tmp_path)).verdict == FAILED
    hidden = replace(check_in(tmp_path), machine=machine(variables={"CUDA_VISIBLE_DEVICES": ""}))
    assert environment(hidden).verdict == PASSED
    assert environment(check_in(tmp_path, "cuda")).text == {"torch.utils.collect_env": "PyTorch version: 2"}
    # Without a profile nothing is predicted.
    assert fidelity(check_in(tmp_path, "cuda")) == Finding(SKIPPED, "there is no profile: see the section profile")


def test_a_process_that_fails_is_named_with_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Sequence[str], log: Path, *__: object) -> str:
        log.write_text("one line\nentrain-bench: tp=3: must divide\n\n")
        return "exit code 2"

    monkeypatch.setattr(gpu_check, "run_python", fail)
    found = profile(check_in(tmp_path))
    assert found == Finding(FAILED, "exit code 2 (entrain-bench: tp=3: must divide); a second call resumes")


@pytest.mark.parametrize(
    ("losses", "verdict", "difference"),
    [
        ([7.0, 6.5, 6.0], None, 0.0),
        ([7.0, 6.5, 6.0006], None, 1e-4),
        # A planted error in one step.
        ([7.0, 6.5065, 6.0], FAILED, 1e-3),
        ([7.0, 6.5, math.nan], FAILED, math.nan),
        ([7.0, 6.5, math.inf], FAILED, math.nan),
        ([7.0, 6.5], FAILED, math.nan),
        ([], FAILED, math.nan),
    ],
)
def test_a_loss_that_differs_is_found(losses: list[float], verdict: str | None, difference: float) -> None:
    row = judge_losses(run_with(*losses), run_with(), reference=[7.0, 6.5, 6.0], tolerance=2e-4)
    assert row.get("verdict") == verdict
    assert row["largest_difference"] == pytest.approx(difference, rel=1e-6, abs=1e-12, nan_ok=True)


def test_the_first_table_has_all_verdicts_and_every_row_is_shown() -> None:
    losses = [
        {"strategy": "megatron", "last_loss": 6.123456789, "verdict": PASSED},
        {"strategy": "dip", "verdict": FAILED, "reason": "rank 1: a | b"},
    ]
    finding = Finding(FAILED, "1 of 2 equal", {"Losses": losses, "Empty": []}, {"nvidia-smi": "GPU0 X"})
    lines = page("Check", {"correctness": asdict(finding) | {"seconds": 61.4}}).splitlines()
    assert lines[:3] == ["# Check", "", "| section | question | verdict | result | seconds |"]
    assert sorted(line.split(" | ")[2] for line in lines[4:8]) == ["failed", *["not run"] * 3]
    assert {"| megatron | 6.123457 | passed |  |", "| dip |  | failed | rank 1: a \\| b |", "GPU0 X"} <= {*lines}
    assert "**Empty**" not in lines
