"""What the benchmark measures; no test asserts a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from entrain_bench.lab import bench
from entrain_bench.lab.__main__ import main
from entrain_bench.lab.bench import CASES, TINY, parts

SMALL = ("model=tiny", "cluster=a40x16", "global_batch=32", "microbatch_size=4", "layout.dp=2")


def test_every_part_of_a_run_is_measured() -> None:
    (megatron, first), (entrain, second) = parts(["megatron", "entrain"], SMALL, repeats=3)
    assert (megatron, entrain) == ("megatron", "entrain")
    for values in (first, second):
        assert all(values[name] > 0 for name in ("plan_s", "assign_s", "schedule_s", "execute_s", "iteration_time_s"))


def test_an_unknown_case_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "parts_64_gpu"]) == 2
    assert "did you mean parts_64_gpus?" in capsys.readouterr().err


def test_a_case_that_fails_is_named_and_the_others_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(name: str) -> dict[str, dict[str, float]]:
        if name == "sweep":
            raise RuntimeError("out of luck")
        return {"first": {"assign_s": 0.5}}

    monkeypatch.setattr(bench, "measure_apart", measure)
    assert main(["bench", "--results-dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "sweep: failed: RuntimeError: out of luck\n"
    written = json.loads((tmp_path / "bench.json").read_text())
    assert written["machine"]["python"]
    assert set(written["cases"]) == set(CASES) - {"sweep"}
    assert written["cases"]["shared_cells"] == {
        "target": CASES["shared_cells"].target,
        "measures": {"first": {"assign_s": 0.5}},
    }


@pytest.mark.wide
def test_runs_sweeps_and_their_memory_are_measured() -> None:
    small = [text for text in TINY if not text.startswith("strategy")]
    shared = dict(bench.sweep_of_jobs([small, [*small, "workload=coco"]], ["megatron", "entrain"]))
    assert [*shared] == ["compose", "megatron", "entrain", "all"]
    assert shared["all"]["cpu_s"] == pytest.approx(sum(shared[name]["cpu_s"] for name in [*shared][:-1]))
    (_, run), (label, memory) = bench.sweep(5, TINY)
    assert run["experiment_s"] > 0
    assert label == "memory_5_runs"
    assert memory["growth"] >= 0


@pytest.mark.wide
def test_a_command_that_fails_is_no_measurement() -> None:
    with pytest.raises(RuntimeError, match=r"no_such_key=1.*: exit code 2"):
        [*bench.commands([*TINY, "no_such_key=1"])]
