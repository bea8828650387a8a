"""The key ``constants``: draws of a file, applied to a run's cluster and part of its key."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.cli import run_command
from entrain_bench.config import constants
from entrain_bench.config.compose import compose
from entrain_bench.config.constants import COLUMNS, draws_text, read_draws, speed_of
from entrain_bench.records.keys import identify, plan_key
from entrain_bench.run.experiment import shared_job
from entrain_bench.specs.cluster import Speed

TINY = ("model=tiny", "cluster=tiny")
DRAWS = {"A40": {1: Speed(gemm=0.5, node=2.0), 2: Speed(launch=3.0)}, "H100-SXM": {1: Speed(memory=0.9)}}


@pytest.fixture(autouse=True)
def draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "config_tree", lambda: tmp_path)
    read_draws.cache_clear()
    path = tmp_path / "posterior.csv"
    path.write_text(draws_text(DRAWS))
    return path


def test_a_draw_multiplies_the_factors_of_speed(draws: Path) -> None:
    assert read_draws(draws) == DRAWS
    config = compose(*TINY, "constants=1", "speed.gemm=0.5", "speed.launch=7")
    assert speed_of(config) == Speed(gemm=0.25, node=2.0, launch=7.0)
    usual, drawn = (shared_job(compose(*TINY, *keys)).truth.cluster for keys in ((), ("constants=1",)))
    assert drawn == usual.at(DRAWS["A40"][1]) != usual
    assert speed_of(compose(*TINY)) == Speed()


def test_draw_and_its_factors_are_part_of_keys(draws: Path) -> None:
    configs = [compose(*TINY, *keys) for keys in ((), ("constants=1",), ("constants=2",))]
    before = [(identify(config)[0], plan_key(config)) for config in configs]
    assert len({key for both in before for key in both}) == 6
    draws.write_text(draws_text(DRAWS | {"A40": {1: Speed(gemm=0.6), 2: DRAWS["A40"][2]}}))
    read_draws.cache_clear()
    after = [(identify(config)[0], plan_key(config)) for config in configs]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("constants=3",), r"constants=3: must be 0, or a draw of A40 in posterior.csv \(1 to 2\)"),
        (("constants=1", "cluster/device=a100"), r"must be 0 for A100-SXM-80GB; posterior.csv has draws of A40, H100"),
    ],
)
def test_a_device_without_the_draw_is_an_error(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        speed_of(compose(*TINY, *overrides))


ROW = b"A40,1" + b",1" * len(COLUMNS[2:])
HEADER = ",".join(COLUMNS).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (HEADER + b"\n" + ROW.replace(b"1,1", b"1,0", 1), ":2: speed.gemm=0.0: must be above 0"),
        (HEADER + b"\n" + ROW.replace(b"1,1", b"1,nan", 1), ":2: speed.gemm=nan: must be a number"),
        (HEADER + b"\n" + ROW.replace(b"1,1", b"1,fast", 1), ":2: could not convert"),
        (HEADER + b"\nA40,1,1", ":2: "),
        (HEADER.replace(b"gemm", b"matmul") + b"\n" + ROW, ":1: has no column gemm"),
        (HEADER.replace(b"draw", b"number") + b"\n" + ROW, ":1: has no column draw"),
        (b"\xff", ":1: 'utf-8' codec can't decode"),
        (HEADER + b"\n" + b"x" * 200_000, ":1: field larger"),
    ],
)
def test_a_wrong_file_is_one_line(
    content: bytes, message: str, draws: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    draws.write_bytes(content)
    read_draws.cache_clear()
    csv.field_size_limit(131_072)  # Python's own; a scan of tables in this process raises it
    assert run_command([*TINY, "constants=1", f"results_dir={tmp_path / 'results'}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"entrain-bench: posterior.csv{message}")
