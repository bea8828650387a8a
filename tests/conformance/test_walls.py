"""Strategies that reach for the truth are caught: by what they import, and by what they do."""

import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.cli import run_command
from entrain_bench.config.schema import RunConfig
from entrain_bench.conformance.suite import (
    CLOSED_MODULES,
    OPEN_ROOMS,
    ViolationError,
    difference,
    require_blind,
    require_walls,
    trespasses,
)
from entrain_bench.run.cells import compose_cells

STRATEGIES = ["entrain_bench_strategies"]
ROOMS = Path(sys.modules["entrain_bench"].__path__[0])

HEAD = """import numpy as np
from entrain_bench.program.assignment import same_microbatches


class Part:
    def deal(self, order, shapes, layout, profile):
        dp = layout.modules[-1].dp
        rank = np.argsort(order, kind="stable")
        microbatch = rank // dp // profile.job.microbatch_size
        return same_microbatches(profile.job.model, shapes, rank % dp, microbatch, microbatch)

    def assign(self, shapes, layout, profile):
        job = profile.job
"""
HONEST = HEAD + "        return self.deal(np.argsort(shapes.text_tokens, kind='stable'), shapes, layout, profile)\n"
# Samples by how long they really take.
PEEKING = """        seconds = np.zeros(len(shapes))
        for module in job.model.modules:
            units = module.units(shapes)
            lengths = module.lengths(shapes, units)
            loads = compute_loads(module, lengths, np.arange(len(lengths) + 1))
            each = sum(kind.total_s for kind in truth.layer_times.layers_s(module, loads, 1, 1))
            seconds += shapes.sum_items(units, each) if module.is_encoder else each
        return self.deal(seconds, shapes, layout, profile)
"""
IMPORTED = "from entrain_bench.costs.truth import CostTruth\nfrom entrain_bench.costs.roofline import compute_loads\n"
BUILT = "        truth = CostTruth(job.model, job.cluster)\n"
BY_NAME = """        import importlib
        compute_loads = importlib.import_module("entrain_bench.costs.roofline").compute_loads
        truth = importlib.import_module("entrain_bench.costs.truth").CostTruth(job.model, job.cluster)
"""
YAML = """
defaults:
  - planner: megatron
  - scheduler: megatron

name: mine
assigner:
  _target_: {module}.Part
"""


class Folder:
    """A folder of somebody who has written an assigner."""

    def __init__(self, path: Path, module: str) -> None:
        self.path, self.module = path, module
        (path / "strategy").mkdir()
        (path / "strategy" / "mine.yaml").write_text(YAML.format(module=module))

    def write(self, text: str) -> None:
        (self.path / f"{self.module}.py").write_text(text)

    def config(self) -> RunConfig:
        small = ["global_batch=16", "microbatch_size=2", "layout.tp=1", "layout.dp=2", "iterations=1"]
        chosen = ["strategy=mine", "model=tiny_av", "workload=synthetic_av", "cluster=a40x16"]
        return compose_cells([*small, *chosen], str(self.path))[0].config

    def check(self, *overrides: str) -> int:
        return run_command(["check", "--config-dir", str(self.path), "strategy=mine", *overrides])


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Folder:
    monkeypatch.setattr(sys, "path", [*sys.path])
    # A module of its own for every test: a name is imported once.
    return Folder(tmp_path, f"part_{abs(hash(request.node.name))}")


# In every run of the tests the example does.
@pytest.mark.wide
def test_a_part_that_imports_the_truth_is_caught_by_both(mine: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    mine.write(IMPORTED + HEAD + BUILT + PEEKING)
    with pytest.raises(ViolationError, match=rf"{mine.module}\.py:1: imports entrain_bench\.costs\.truth\.CostTruth"):
        require_walls(mine.config())
    with pytest.raises(ViolationError, match=r"(the layout|program of iteration \d) depends on the hidden cost model"):
        require_blind(mine.config())
    assert mine.check("workload=synthetic_av", "model=tiny_av", "cluster=a40x16") == 1
    shown = capsys.readouterr().out
    assert f"{mine.path / mine.module}.py:1: imports" in shown
    assert "program of iteration" in shown


@pytest.mark.wide
def test_what_hides_from_one_check_is_caught_by_the_other(mine: Folder) -> None:
    mine.write(HEAD + BY_NAME + PEEKING)
    require_walls(mine.config())
    with pytest.raises(ViolationError, match="depends on the hidden cost model"):
        require_blind(mine.config())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("from entrain_bench.costs import truth", "1: imports entrain_bench.costs.truth"),
        ("import entrain_bench.simulate.engine", "1: imports entrain_bench.simulate.engine"),
        ("import entrain_bench", "1: imports entrain_bench"),
        ("from entrain_bench.run import experiment", "1: imports entrain_bench.run.experiment"),
        # Through a room that is open.
        ("from entrain_bench.balancing.profile import CostTruth", "1: imports entrain_bench.costs.truth"),
        ("from entrain_bench.records.records import Results", "1: imports entrain_bench.records.records.Results"),
        ("from entrain_bench_workloads.trace import TraceWorkload", "1: imports entrain_bench_workloads.trace"),
        ("def f(profile):\n    return profile._truth", "2: reads profile._truth"),
        ("def f(self):\n    return self._truth", None),
        (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from entrain_bench.costs.memory import Memory",
            None,
        ),
        ("from entrain_bench.program import Program\nimport entrain_bench.base.arrays", None),
        ("from entrain_bench_strategies.megatron import MegatronPlanner", None),
        ("import numpy, pandas", None),
    ],
)
def test_what_is_closed_is_named_by_where_it_is_defined(mine: Folder, text: str, said: str | None) -> None:
    mine.write(text + "\n")
    sys.path.insert(0, str(mine.path))
    found = trespasses({mine.module})
    assert (found == []) if said is None else (len(found) == 1 and f".py:{said}" in found[0])


def test_a_neighbour_that_reaches_for_the_truth_is_caught(mine: Folder) -> None:
    mine.write("from closed_neighbour import truth_of\n" + HONEST)
    (mine.path / "closed_neighbour.py").write_text("from entrain_bench.costs.truth import CostTruth as truth_of\n")
    with pytest.raises(ViolationError, match=r"closed_neighbour\.py:1"):
        require_walls(mine.config())


def test_the_contracts_of_the_repository_close_what_the_check_closes() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    (closed,) = (each["forbidden_modules"] for each in contracts if each.get("source_modules") == STRATEGIES)
    rooms = {path.stem for path in ROOMS.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert rooms > OPEN_ROOMS
    assert {name.partition(".")[2] for name in closed if name.startswith("entrain_bench.")} == (
        (rooms - OPEN_ROOMS - {"__init__"}) | CLOSED_MODULES
    )


def test_a_difference_is_named() -> None:
    @dataclass
    class Pair:
        left: object
        right: tuple[object, ...]
        _cache: int = 0

    one = Pair(np.arange(3), (1, "a"))
    assert difference(one, Pair(np.arange(3), (1, "a"), 5)) == ""
    assert difference(one, Pair(np.array([0, 1, 3]), (1, "a"))) == "left"
    assert difference(one, Pair(np.arange(3), (1, "b"))) == "right.1"
    assert difference(one, Pair(np.arange(3), (1,))) == "right"
    assert difference(one, Pair([0, 1, 2], (1, "a"))) == "left"


@pytest.mark.wide
def test_an_error_in_an_outside_part_names_its_file_and_line(mine: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    mine.write(HEAD + "        return np.zeros(3)[5]\n")
    run = ["--config-dir", str(mine.path), "strategy=mine", "model=tiny", "cluster=tiny", "mlflow=false"]
    assert run_command([*run, "layout.tp=1", "layout.dp=2", f"results_dir={mine.path / 'results'}"]) == 1
    line = f"{mine.path / mine.module}.py:14 in assign: IndexError"
    assert line in capsys.readouterr().err
    assert mine.check("workload=chartqa", "model=tiny", "cluster=tiny") == 1
    assert line in capsys.readouterr().out


def test_what_a_hook_must_return_is_said_with_its_place(mine: Folder) -> None:
    mine.write(HEAD + "        return None\n")
    with pytest.raises(
        UserError, match=rf"{mine.module}\.py:12: Part\.assign returned None: must be an object of class Assignment"
    ):
        require_blind(mine.config())
