"""Printed commands, pasted, give the same record keys: of random sweeps, and of what is awkward to quote."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrain_bench.answers.commands import commands_of, decisive_overrides, quoted
from entrain_bench.config.overrides import parse
from support.records import runs
from support.sweeps import make_folder, sweep_problem

NUM_SWEEPS = 20


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(NUM_SWEEPS))
def test_commands_of_random_sweeps_give_the_same_keys(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert sweep_problem(seed) == ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("drawn")
    make_folder(made)
    return made


def test_a_product_is_one_line_and_the_rest_few() -> None:
    every = runs({"first": [1.0] * 3, "second": [1.0] * 3})
    assert commands_of(every) == ["entrain-bench --multirun strategy=first,second workload=coco seed=0,1,2"]
    assert commands_of(every[:-1], "else where") == [
        "entrain-bench --multirun strategy=first workload=coco seed=0,1,2 'results_dir='\"'\"'else where'\"'\"''",
        "entrain-bench --multirun strategy=second workload=coco seed=0,1 'results_dir='\"'\"'else where'\"'\"''",
    ]
    assert commands_of(every[:1]) == ["entrain-bench strategy=first workload=coco seed=0"]


def test_where_results_go_and_how_a_sweep_is_launched_is_left_out() -> None:
    made = ["results_dir=x", "mlflow=false", "retry=failed", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    assert decisive_overrides([*made, "figure=quick", "seed=1", "seed=2", "+figure.strategies=[all]"]) == {"seed": "=2"}


def test_values_that_a_figure_sets_for_single_runs_are_kept(tmp_path: Path) -> None:
    (tmp_path / "figure").mkdir()
    sweep = "# @package _global_\nhydra: {sweeper: {params: {seed: 0}}}\nglobal_batch: 64\nlayout: {tp: null}\n"
    (tmp_path / "figure" / "own.yaml").write_text(sweep)
    found = decisive_overrides(["figure=own", "seed=0", "layout.tp=4"], str(tmp_path))
    assert found == {"global_batch": "=64", "layout.tp": "=4", "seed": "=0"}


TEXTS = ["plain", "a b", "a,b", "it's", '"', "\\", "\\'", "a\\", "1", "null", "true", "", "${x}", "é"]


@pytest.mark.parametrize("value", [*TEXTS, None, 1.5, [1, "a,b"]])
def test_values_are_read_as_they_were(value: object) -> None:
    (read,) = (parse(f"key={text}").value() for text in [quoted(value)])
    assert [str(each) for each in read] == [str(each) for each in value] if isinstance(value, list) else read == value
