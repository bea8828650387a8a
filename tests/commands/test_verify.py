"""``entrain-bench verify results_dir=X``: what it finds in a folder, and what it computes again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from entrain_bench.cli import run_command
from entrain_bench.records import code
from entrain_bench.records.sealed import sealed

JOB = ["model=tiny", "cluster=tiny", "global_batch=16", "microbatch_size=2", "layout.tp=1", "layout.dp=2"]
SWEEP = ["--multirun", "strategy=megatron,entrain", "seed=0,1", "iterations=2", "mlflow=false", *JOB]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "results"
    assert run_command([*SWEEP, f"results_dir={folder}"]) == 0
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "results")
    return tmp_path / "results"


def change_record(folder: Path, change: Callable[[dict[str, float]], object]) -> Path:
    """Change the metrics of a record and make its hash anew, as somebody would who knows how."""
    path = sorted((folder / "runs").rglob("*.json"))[0]
    values = json.loads(path.read_text())
    del values["sha256"]
    change(values["metrics"])
    path.write_bytes(sealed(path.stem, values))
    return path


def verify(folder: Path, capsys: pytest.CaptureFixture[str], *more: str, code: int) -> list[str]:
    assert run_command(["verify", f"results_dir={folder}", *more]) == code
    return capsys.readouterr().out.splitlines()


def test_a_fresh_folder_is_verified_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    (line,) = verify(folder, capsys, "sample=3", code=0)
    assert line.startswith(
        f"VERIFIED {folder}: 4 runs of 1 recorded sweep, 4 proved by hash and key; 3 of 4 simulated again (seed 0), "
        "0 different; 0 problems; entrain-bench "
    )
    assert all(f" {name} " in line for name in ("python", "numpy", "scipy", "numba", "ortools"))
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_result_that_was_changed_with_its_hash_is_computed_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def halve(metrics: dict[str, float]) -> None:
        metrics["iteration_time_s"] /= 2

    path = change_record(folder, halve)
    (folder / "table.csv").unlink()
    different, verdict = verify(folder, capsys, code=1)
    assert different.startswith(f"{path}: iteration_time_s is now 0.")
    assert "strategy=" in different
    assert verdict.startswith(f"NOT VERIFIED {folder}: 4 runs of 1 recorded sweep, 4 proved by hash and key; 4 of 4")
    assert "1 different; 1 problem;" in verdict


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: next((folder / "timelines").rglob("*.parquet")).unlink(), "absent, though its run kept it"),
        (lambda folder: next((folder / "plans").rglob("*.json")).write_text("{"), "the layout is planned again"),
        (lambda folder: next((folder / "sweeps").rglob("*.json")).write_text("{"), "is not that of its hash"),
        (lambda folder: next((folder / "runs").rglob("*.json")).unlink(), "has no record of strategy="),
        (lambda folder: (folder / "table.csv").write_text("strategy\n"), "is not the table of the records"),
        (lambda folder: (folder / "table.csv").write_bytes(b"\xff"), "is not the table of the records"),
    ],
    ids=["timeline", "plan", "sweep", "record", "table", "binary table"],
)
def test_what_is_not_as_it_was_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Path], object], says: str
) -> None:
    change(folder)
    lines = verify(folder, capsys, "sample=0", code=1)
    assert says in lines[0]
    assert lines[-1].startswith(f"NOT VERIFIED {folder}: ")


@pytest.mark.wide
def test_a_record_under_a_key_that_is_not_its_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = sorted((folder / "runs").rglob("*.json"))[:2]
    values = json.loads(first.read_text())
    del values["sha256"]
    second.write_bytes(sealed(second.stem, values))
    assert any("its overrides and data give another key" in line for line in verify(folder, capsys, code=1))


def test_runs_of_another_library_are_other_runs(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = code.releases_of
    monkeypatch.setattr(code, "releases_of", lambda name: "numpy==0" if name == "numpy" else known(name))
    code.code_version.cache_clear()
    note, verdict = verify(folder, capsys, code=1)
    code.code_version.cache_clear()
    assert note.startswith("4 runs of other code or libraries: commit ")
    assert "0 proved by hash and key, 4 of other code or libraries (not compared); 0 of 0 simulated" in verdict


@pytest.mark.wide
def test_code_of_others_runs_only_where_it_is_trusted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine, results = tmp_path / "mine", tmp_path / "results"
    (mine / "strategy").mkdir(parents=True)
    (mine / "theirs.py").write_text(
        "from entrain_bench_strategies.megatron import MegatronPlanner\n\n\nclass Theirs(MegatronPlanner):\n    pass\n"
    )
    (mine / "strategy" / "theirs.yaml").write_text(
        "defaults: [megatron, _self_]\nname: theirs\nplanner: {_target_: theirs.Theirs}\n"
    )
    run = [*JOB, "iterations=1", "mlflow=false", f"results_dir={results}", "strategy=theirs", "--config-dir", str(mine)]
    assert run_command(run) == 0
    capsys.readouterr()
    line, _ = verify(results, capsys, code=1)
    assert line.endswith(f"needs code of {mine}; if you trust it, add --config-dir FOLDER")
    assert "1 of 1 simulated again" in verify(results, capsys, "--config-dir", str(mine), code=0)[0]
