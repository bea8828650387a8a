"""Options of ``entrain-bench profile``: whatever is wrong with them is one line, before anything is measured."""

import shlex
from pathlib import Path

import pytest

from entrain_bench.cli import run_command
from entrain_bench.config.compose import compose
from entrain_bench.costs.profiled.file import write_profile
from entrain_bench.specs.model import ModelSpec
from entrain_bench.train.profiling.settings import ProfileSettings
from support.cli import asked
from support.profiled import profile_of_formula


def composed(*overrides: str) -> tuple[ModelSpec, ProfileSettings]:
    _, request = asked(shlex.join(["profile", *overrides]))
    return ModelSpec.from_config(compose(*request.overrides).model), request.keys


BAD_OPTIONS = [
    ("model=tinny", "did you mean tiny?"),
    ("token=[1]", "did you mean tokens=[1]?"),
    ("tokens=many", "tokens"),
    ("tokens=[]", "at least one number of tokens"),
    ("tokens=[16,0]", "tokens=[16, 0]: must be different integers of at least 1"),
    ("tokens=[16,16]", "tokens=[16, 16]: must be different integers of at least 1"),
    ("tp=[]", "at least one degree"),
    ("cp=[2]", "degrees of which one is 1"),
    ("tp=[1,3]", "tp=3: must divide the 4 heads of module vision"),
    ("ranks=[1]", "at least 2"),
    ("message_bytes=[0]", "at least 1"),
    ("device=tpu", "device=tpu: unknown"),
    ("device=cuda", "device=cuda: this machine has no CUDA device"),
    ("dtype=float16", "dtype=float16: unknown"),
    ("threads=0", "threads=0: must be at least 1"),
    ("min_repetitions=9 max_repetitions=3", "max_repetitions=3: must be at least min_repetitions=9"),
    ("precision=0", "precision=0.0: must be in (0, 1)"),
    ("point_s=0", "point_s=0.0: must be positive"),
    ("peak_bf16_flops=-1", "peak_bf16_flops=-1.0: must be positive"),
    ("model=mllm_9b", "has a generator (generator), which entrain-bench profile does not"),
    ("strategy=entrain", "strategy"),
]


@pytest.mark.wide
@pytest.mark.parametrize(("overrides", "says"), BAD_OPTIONS, ids=[case[0] for case in BAD_OPTIONS])
def test_bad_options_are_one_line_and_exit_code_2(
    overrides: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    assert run_command(["profile", "model=tiny", *overrides.split(), f"output={path}"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.strip().splitlines()
    assert line.startswith("entrain-bench: ")
    assert says in line
    assert not path.exists()


def test_the_profile_of_another_device_is_not_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = composed("model=tiny")
    path = tmp_path / "profile.json"
    write_profile(path, profile_of_formula(model, tokens=(1,)))
    before = path.read_bytes()
    assert run_command(["profile", "model=tiny", f"output={path}"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "holds a profile with device=made up. Choose another file, or remove it" in line
    assert path.read_bytes() == before


def test_degrees_are_those_that_divide_the_model() -> None:
    found = composed("model=tiny")[1].degrees(composed("model=tiny")[0])
    assert found == [(tp, cp) for tp in (1, 2, 4) for cp in (1, 2, 4)]
    model, settings = composed("tp=[1,2]", "cp=[1]")
    assert settings.degrees(model) == [(1, 1), (2, 1)]


def test_help_shows_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["profile", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name}=" in shown for name in ProfileSettings.__dataclass_fields__)
