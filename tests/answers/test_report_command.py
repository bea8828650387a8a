"""The report on real runs: one's own strategy, a quick look and more seeds, lost cells; the same answer everywhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from entrain_bench.answers.answer import Answer
from entrain_bench.cli import run_command
from entrain_bench.records.records import Results
from support.sweeps import pasted

SMALL = ["model=tiny", "cluster=a40x16", "global_batch=32", "microbatch_size=2", "layout.dp=2", "iterations=1"]
MINE = """
defaults: [{planner: megatron}, {assigner: token_budget}, {scheduler: megatron}]
name: mine
planner: {profile_samples: 8}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "strategy").mkdir(parents=True)
    (tmp_path / "own" / "strategy" / "mine.yaml").write_text(MINE)
    return tmp_path


def sweep(*overrides: str) -> None:
    assert run_command([*SMALL, "mlflow=false", "--multirun", *overrides]) == 0


def written(suffix: str = "md") -> str:
    return Path(f"results/report.{suffix}").read_text()


def pasted_keys() -> set[str]:
    """Keys of the cells of all commands on the page."""
    return {cell.key for line in re.findall(r"^    (entrain-bench .*)$", written(), re.M) for cell in pasted(line)}


@pytest.mark.wide
@pytest.mark.parametrize("told", [[], ["--config-dir", "own"]])
def test_ones_own_strategy_on_another_device_is_reported_with_and_without_its_folder(told: list[str]) -> None:
    sweep("--config-dir", "own", "strategy=mine,megatron", "seed=0,1", "cluster/device=h100")
    assert run_command(["report", *told]) == 0
    keys = {record.key for record in Results(Path("results")).records()}
    assert len(keys) == 4
    assert pasted_keys() == keys
    (line,) = re.findall(r"^    (entrain-bench .*)$", written(), re.M)
    assert "--config-dir own" in line
    assert "cluster/device=h100" in line
    assert len(line) < 300
    assert "older code" not in written()


@pytest.mark.wide
def test_a_quick_look_and_then_three_seeds_are_both_in_the_answer() -> None:
    sweep("strategy=megatron,entrain,disttrain", "seed=0")
    sweep("strategy=megatron,entrain", "seed=0,1,2")
    assert run_command(["report", "share=true"]) == 0
    assert Path("results/report.png").read_bytes().startswith(b"\x89PNG")
    text = written()
    values = Answer.of(Results(Path("results")).records()).to_dict()
    assert values["fewer_seeds"] == [{"strategies": ["disttrain"], "seeds": [0]}]
    assert {"braid", "omnibal"} < {*values["not_run"]}
    assert "| 0 to 2 | [7](#runs-1) |" in text
    assert pasted_keys() == {record.key for record in Results(Path("results")).records()}
