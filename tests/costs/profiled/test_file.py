"""Profile files: written and read, and whatever can be wrong with one said in one line."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.cli import run_command
from entrain_bench.costs.profiled.file import DeviceProfile, read_profile, to_bytes, write_profile
from entrain_bench.run.cells import compose_cells
from entrain_bench.specs.model import ModelSpec
from support.profiled import profile_of_formula, written

# 16 GPUs and a small batch: a run takes milliseconds.
SMALL = ("model=tiny", "cluster=a40x16", "cluster/device=profiled", "global_batch=16", "iterations=1", "mlflow=false")
LAYOUT = ("strategy=megatron", "workload=coco", "layout.tp=1", "layout.dp=2", "layout.pp=8", "microbatch_size=2")


@cache
def profile() -> DeviceProfile:
    return profile_of_formula(ModelSpec.from_config(compose_cells(["model=tiny"])[0].config.model))


@cache
def content() -> bytes:
    return to_bytes(profile())


def run(folder: Path, *overrides: str) -> int:
    return run_command([*SMALL, *LAYOUT, f"results_dir={folder / 'results'}", *overrides])


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_profile(tmp_path / "profile.json", profile())
    assert read_profile(tmp_path / "profile.json", "x") == profile()


@pytest.mark.wide
def test_a_run_takes_its_times_from_the_file_and_is_known_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    seconds = []
    for factor in (1, 2, 1):
        stages = tuple(
            replace(point, forward_s=tuple(factor * each for each in point.forward_s)) for point in profile().stages
        )
        assert run(tmp_path, written(path, replace(profile(), stages=stages))) == 0
        records = [json.loads(file.read_text()) for file in (tmp_path / "results" / "runs").rglob("*.json")]
        seconds.append(sorted(record["metrics"]["iteration_time_s"] for record in records))
    one, two, three = seconds
    assert len(one) == 1
    # Forwards are a third of the work; the third run has the first one's record.
    assert two[-1] == pytest.approx(4 / 3 * one[0], rel=0.05)
    assert two == three


def edited(change: Callable[[dict[str, Any]], object]) -> bytes:
    values = json.loads(content())
    change(values)
    return json.dumps(values).encode()


def without(values: dict[str, Any], kind: str) -> None:
    values["stages"] = [point for point in values["stages"] if point["kind"] != kind]


BAD_FILES: list[tuple[str, Callable[[], bytes], str]] = [
    ("truncated", lambda: content()[:-200], "is not a device profile, or is truncated"),
    ("garbage", lambda: b"\x80\x04pickle", "is not a device profile, or is truncated"),
    ("a list", lambda: b"[1]", "must be a mapping"),
    ("another version", lambda: edited(lambda v: v.update(version=2)), "version=2: must be 3. To make one, run"),
    ("unfinished", lambda: edited(lambda v: v.update(finished=False)), "is not finished"),
    ("no constants", lambda: edited(lambda v: v.pop("constants")), "constants: missing"),
    ("negative", lambda: edited(lambda v: v["steps"][0].update(seconds=[-1, 1, 2])), "steps[0].seconds=[-1.0"),
    ("not a number", lambda: edited(lambda v: v["stages"][0].update(backward_s=[1, float("nan"), 2])), "a number"),
    ("out of order", lambda: edited(lambda v: v["stages"][0].update(backward_s=[2, 1, 3])), "in order"),
    ("no steps", lambda: edited(lambda v: v.update(steps=[])), "has no optimizer step"),
    ("no heads", lambda: edited(lambda v: without(v, "head")), "has no layer head of module vision"),
    (
        "zero memory",
        lambda: edited(lambda v: v["constants"].update(memory_bytes=0)),
        "memory_bytes=0: must be positive",
    ),
    ("no source", lambda: edited(lambda v: v["constants"]["sources"].clear()), "missing. State the source"),
]


@pytest.mark.wide
@pytest.mark.parametrize(("make", "says"), [case[1:] for case in BAD_FILES], ids=[case[0] for case in BAD_FILES])
def test_bad_files_are_one_line_and_exit_code_2(
    make: Callable[[], bytes], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(make())
    assert run(tmp_path, f"cluster.device.path={path}") == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"entrain-bench: cluster.device.path={path}")
    assert says in line
    assert not (tmp_path / "results").exists()


BAD_USE = [
    ("model=tiny_av", "was measured with model=tiny, which has no module audio"),
    ("model.modules.llm.ffn_hidden_size=512", "whose llm has ffn_hidden_size=256. This model has 512"),
    ("sequence_parallel=false", "was measured with sequence_parallel=true. Set the same here, or profile"),
    ("layout.tp=4 layout.pp=2", "was profiled at tp 1, 2, not at 4"),
    ("cluster.device.path=/nonexistent.json", "/nonexistent.json: cannot be read (No such file or directory)"),
]


@pytest.mark.wide
@pytest.mark.parametrize(("overrides", "says"), BAD_USE, ids=[case[0] for case in BAD_USE])
def test_a_profile_that_does_not_fit_is_one_line(
    overrides: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    override = written(tmp_path / "profile.json", profile())
    assert run(tmp_path, override, *overrides.split()) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert says in line


@pytest.mark.wide
def test_a_model_with_other_numbers_of_layers_has_the_same_times(tmp_path: Path) -> None:
    override = written(tmp_path / "profile.json", profile())
    assert run(tmp_path, override, "model.modules.llm.num_layers=6", "layout.pp=4", "layout.dp=4") == 0


def test_a_path_must_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path) == 2
    assert "cluster.device.path: must be given" in capsys.readouterr().err


@pytest.mark.wide
def test_a_file_that_cannot_be_written_is_named() -> None:
    with pytest.raises(UserError, match=r"^output=/proc/nowhere/x.json: cannot be written"):
        write_profile(Path("/proc/nowhere/x.json"), profile())
