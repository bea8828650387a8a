"""Verdicts of sections: tests, losses, and programs that failed, were left out, or are predicted badly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from entrain_bench.lab.gpu_check import sections
from entrain_bench.lab.gpu_check.command import SectionResult, page
from entrain_bench.lab.gpu_check.runs import FAILED, PASSED, SKIPPED, Check, Finding
from entrain_bench.lab.gpu_check.sections import (
    SECTIONS,
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
from entrain_bench.records.records import Record
from support.gpu_check import check_in, machine

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
