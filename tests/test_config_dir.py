"""A folder of the user's: every kind of choice is found there, alone, in sweeps over all choices, and by make."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from entrain_bench.answers.documents.claims import load_claims
from entrain_bench.answers.documents.tables import load_tables
from entrain_bench.base.errors import UserError
from entrain_bench.cli import run_command
from entrain_bench.config.compose import Composer
from entrain_bench.config.tree import choices
from entrain_bench.run.cells import compose_cells

CODE = '''
from dataclasses import dataclass

import numpy as np

from entrain_bench.simulate import Simulator
from entrain_bench.specs.shapes import shapes_from_lists


@dataclass(frozen=True)
class Growing:
    """Samples of one image each, of rising size."""

    name: str

    def fingerprint(self):
        return ""

    def source(self, rules):
        return self

    def batch(self, iteration, num_samples, seed):
        return self.take(np.arange(num_samples) + iteration + seed)

    def draw(self, num_samples, rng):
        return self.take(rng.integers(0, 64, num_samples))

    def take(self, index):
        return shapes_from_lists(["image"], [(10 + int(i), [("image", 40, 10)]) for i in index])


class Loud(Simulator):
    """Simulates, and says so."""

    def execute(self, program):
        print("executed")
        return super().execute(program)
'''
YAMLS = {
    "strategy/theirs.yaml": """
defaults:
  - planner: megatron
  - assigner: theirs
  - scheduler: megatron
name: theirs
""",
    "strategy/assigner/theirs.yaml": "_target_: entrain_bench_strategies.megatron.ArrivalOrder\n",
    "workload/growing.yaml": "_target_: their_code.Growing\nname: growing\n",
    "model/theirs.yaml": """
defaults:
  - module@modules.vision: tiny_vision
  - module@modules.llm: theirs
  - tokens: qwen25vl
  - _self_
name: theirs
""",
    "model/module/theirs.yaml": "defaults: [tiny_llm, _self_]\nnum_layers: 4\n",
    "cluster/theirs.yaml": "defaults: [{node@_here_: a40}, {device@_here_: a40}, _self_]\nname: theirs\nnum_nodes: 1\n",
    "harness/loud.yaml": "_target_: their_code.Loud\nlabel: loud\n",
    "figure/theirs.yaml": """# @package _global_
hydra:
  sweeper:
    params:
      strategy: glob(*)
      workload: growing
""",
    "table/page.yaml": """
tables:
  theirs_table: {title: Seconds, common: [workload=growing], corner: strategy, rows: {Theirs: [strategy=theirs]},
    show: "{iteration_time_s:.1f}"}
""",
    "claim/paper.yaml": """
claims:
  theirs:
    claim: Theirs is faster
    paper: "2605.27918"
    where: nowhere
    value: 1.1
    unit: x
    paper_setting: none
    measure: iteration_time_s
    common: [workload=growing]
    to: [strategy=theirs]
    published: {setting: none, of: [strategy=megatron_rigid]}
    fair: {setting: none, of: [strategy=megatron]}
    why: because
""",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "their_code", raising=False)
    for name, text in YAMLS.items():
        path = tmp_path / "a folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "a folder" / "their_code.py").write_text(CODE)
    return tmp_path / "a folder"


def test_a_run_may_be_made_of_their_choices_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["strategy=theirs", "workload=growing", "model=theirs", "cluster=theirs", "harness=loud"]
    small = ["global_batch=8", "microbatch_size=2", "layout.tp=1", "layout.dp=2", "iterations=2", "mlflow=false"]
    assert run_command(["--config-dir", str(folder), *chosen, *small, f"results_dir={tmp_path / 'results'}"]) == 0
    (path,) = (tmp_path / "results" / "runs").rglob("*.json")
    labels = json.loads(path.read_text())["labels"]
    assert {group: labels[group] for group in ("strategy", "workload", "model", "cluster", "harness")} == {
        "strategy": "theirs",
        "workload": "growing",
        "model": "theirs",
        "cluster": "theirs",
        "harness": "loud",
    }
    assert capsys.readouterr().out.count("executed") == 2


@pytest.mark.wide
@pytest.mark.parametrize(("sweep", "left_out"), [("strategy=glob(*)", False), ("figure=theirs", True)])
def test_a_sweep_over_all_strategies_takes_theirs_too(folder: Path, sweep: str, left_out: bool) -> None:
    cells = Composer(str(folder)).sweep([sweep]).cells
    found = {text.partition("=")[2] for cell in cells for text in cell if text.startswith("strategy=")}
    assert {"theirs", "megatron", "entrain"} < found <= {*choices("strategy"), "theirs"}
    assert ("megatron_rigid" not in found) is left_out
    assert len(compose_cells([sweep], str(folder), multirun=True)) == len(found) == len(cells)


def test_a_word_of_theirs_that_means_nothing_is_named(folder: Path) -> None:
    yaml = folder / "strategy" / "theirs.yaml"
    yaml.write_text(f"{yaml.read_text()}in_figures: some\n")
    with pytest.raises(UserError, match=r"theirs: in_figures=some: .*choices: all, free, main, none"):
        Composer(str(folder)).sweep(["figure=theirs"])


@pytest.mark.wide
def test_a_sweep_without_the_folder_does_not(folder: Path) -> None:
    Composer(str(folder)).sweep(["strategy=glob(*)"])
    assert len(Composer().sweep(["strategy=glob(*)"]).cells) == len(choices("strategy"))


def test_their_claims_come_after_ours(folder: Path) -> None:
    ours, both = load_claims(), load_claims(str(folder))
    assert both[: len(ours)] == ours
    assert both[-1].config_dir == str(folder)
    assert [claim.name for claim in both[len(ours) :]] == ["theirs"]


def test_their_tables_come_after_ours(folder: Path) -> None:
    ours, both = load_tables(), load_tables(str(folder))
    assert both[:-1] == ours
    # There is no file of this repository that a page could link to.
    assert (both[-1].name, both[-1].file) == ("theirs_table", "")


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("target", ["figures", "claims"])
def test_make_hands_the_folder_on(target: str) -> None:
    def recipe(*variables: str) -> str:
        command = ["make", "--dry-run", "--assume-old=setup", target, *variables]
        return subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True).stdout

    assert "--config-dir" not in recipe()
    assert 'entrain-bench figures --config-dir "a folder"' in recipe("CONFIG_DIR=a folder")
