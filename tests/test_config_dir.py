"""A folder of the user's: every kind of choice is found there, alone, and in sweeps over all choices."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pandas as pd
import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.cli import run_command
from entrain_bench.commands import outputs
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
family: published
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
    "figure/drawn.yaml": """# @package _global_
# Two strategies on growing samples.
hydra:
  sweeper:
    params:
      strategy: theirs,megatron
      workload: growing
      model: theirs
      cluster: theirs
      layout.tp: 1
      layout.dp: 2
      global_batch: 8
      microbatch_size: 2
      iterations: 1
      seed: 0,1
figure: {drawing: iteration_time}
""",
}

FIGURE = '''"""Iteration time of every run."""

import pandas as pd
from matplotlib.figure import Figure

EXPERIMENT = "drawn"
RUNS = True


def load(cells, results):
    records = [results.read(cell.key) for cell in cells]
    return pd.DataFrame([{"run": record.key, "s": record.metrics["iteration_time_s"]} for record in records])


def draw(data):
    figure = Figure()
    figure.add_subplot().plot(data["s"])
    return figure, data
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "their_code", raising=False)
    for name, text in YAMLS.items():
        path = tmp_path / "a folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "a folder" / "their_code.py").write_text(CODE)
    (tmp_path / "a folder" / "figures").mkdir()
    (tmp_path / "a folder" / "figures" / "own_plot.py").write_text(FIGURE)
    return tmp_path / "a folder"


@pytest.mark.wide
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


def figures(folder: Path, *arguments: str) -> int:
    return run_command(["figures", "--config-dir", str(folder), *arguments, "mlflow=false"])


@pytest.mark.wide
def test_their_figures_are_made(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "num_processes", lambda: 1)
    results = tmp_path / "results"
    assert figures(folder, "drawn", "own_plot", f"results_dir={results}") == 0
    assert "2 figures and documents" in (said := capsys.readouterr().err)
    assert "4 runs)" in said
    drawn = pd.read_csv(results / "figures" / "drawn.csv")
    assert {*drawn["strategy"]} == {"theirs", "megatron"}
    assert len(pd.read_csv(results / "figures" / "own_plot.csv")) == 4
    stated = json.loads((results / "figures" / "own_plot.json").read_text())
    assert stated["command"] == f"entrain-bench figures own_plot --config-dir '{folder}'"
    assert stated["caption"].startswith("Iteration time of every run.")
    # Over a job of the user's the figure is another.
    assert figures(folder, "own_plot", "workload=synthetic", f"results_dir={results}") == 0
    (other,) = (results / "figures").glob("own_plot_synthetic_*.csv")
    assert len(pd.read_csv(other)) == 4


@pytest.mark.parametrize(
    ("path", "text", "says"),
    [
        ("figures/quick.py", "", "there is a figure quick; must have another name"),
        ("figures/own_plot.py", "def", "own_plot.py:1: not Python: "),
        ("figures/own_plot.py", "RUNS = True", "must define EXPERIMENT, RUNS, load and draw; EXPERIMENT is missing"),
        ("figures/own_plot.py", FIGURE.replace('"drawn"', '"none"'), "EXPERIMENT=none: must be the name of a YAML"),
        ("figure/other.yaml", "figure: {drawing: twnis}", "figure.drawing=twnis: unknown (did you mean twins?)"),
    ],
)
def test_what_is_wrong_with_their_figures_is_one_line(
    path: str, text: str, says: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / path).write_text(text)
    name = "other" if "other" in path else "own_plot"
    assert figures(folder, name, f"results_dir={tmp_path / 'results'}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("entrain-bench: ")
    assert says in line


def test_a_name_that_no_folder_has_says_which_file_would(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^strategy=mine: unknown\. All: .*\. To add your own: --config-dir FOLDER, "):
        compose_cells(["strategy=mine"])
    with pytest.raises(
        UserError, match=rf"^strategy=mine: unknown\. All: .*\. {tmp_path}/strategy/mine\.yaml does not "
    ):
        compose_cells(["strategy=mine"], str(tmp_path))
    with pytest.raises(
        UserError, match=r"^strategy=entrian: unknown \(did you mean entrain\?\)\. All: entrain-bench ls strategies\. "
    ):
        compose_cells(["strategy=entrian"])
