"""The example to copy: it runs, passes every check, names every hook, and does what it says."""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml

from entrain_bench.balancing.estimates import LayerProfile, ProfiledSamples, UnitEstimates
from entrain_bench.balancing.interface import Assigner, Drafter, Observer, Planner, Scheduler
from entrain_bench.balancing.profile import Profile, ProgramTimes
from entrain_bench.cli import run_command
from entrain_bench.config.compose import Composer
from entrain_bench.config.schema import RunConfig
from entrain_bench.conformance.suite import PARTS
from entrain_bench.program import Pass
from entrain_bench.program.timeline import Timeline
from entrain_bench.program.validate import check_program
from entrain_bench.run.experiment import prepare
from support.builders import chain_layout, profile_of, tiny_job, tiny_model, uniform_batch

FOLDER = Path(__file__).parents[1] / "examples" / "my_strategy"
TEXT = (FOLDER / "my_strategy.py").read_text()
SMALL = ("model=tiny", "cluster=a40x16", "global_batch=64", "microbatch_size=2", "layout.dp=2", "iterations=3")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    yield importlib.import_module("my_strategy")
    sys.modules.pop("my_strategy")


@pytest.fixture
def composer(example: ModuleType) -> Composer:
    return Composer(str(Path(example.__file__ or "").parent))


def config(composer: Composer, *overrides: str) -> RunConfig:
    return composer.run([*SMALL, "strategy=mine", *overrides])


@pytest.mark.wide
@pytest.mark.usefixtures("example")
def test_it_runs(tmp_path: Path) -> None:
    mine = ["--config-dir", str(FOLDER), "strategy=mine", *SMALL]
    assert run_command([*mine, "mlflow=false", f"results_dir={tmp_path}"]) == 0
    (path,) = (tmp_path / "runs").rglob("*.json")
    record = json.loads(path.read_text())
    assert record["status"] == "ok"
    assert record["labels"]["strategy"] == "mine"


@pytest.mark.wide
@pytest.mark.usefixtures("example")
def test_it_passes_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["check", "--config-dir", str(FOLDER), "strategy=mine"]) == 0
    shown = capsys.readouterr().out
    assert "failed:" not in shown
    *_, verdict, following = shown.splitlines()
    assert verdict.startswith("passed: no rule is broken in ")
    compared = "strategy=megatron,mine workload=chartqa seed=0,1,2"
    assert following == f"next: entrain-bench --multirun {compared} --config-dir {FOLDER}"
    # A model without audio cannot take samples with audio; nothing else is left out.
    assert shown.count("skipped:") == 1


@pytest.mark.wide
def test_every_hook_and_all_that_a_profile_offers_is_in_it(composer: Composer) -> None:
    for part in (Planner, Assigner, Observer, Drafter, Scheduler):
        for hook in (name for name in vars(part) if callable(getattr(part, name)) and not name.startswith("_")):
            assert f"    def {hook}(" in TEXT
    documented = ast.get_docstring(ast.parse(TEXT)) or ""
    for view in (Profile, ProfiledSamples, LayerProfile, UnitEstimates, ProgramTimes):
        for name in (name for name in dir(view) if not name.startswith("_")):
            assert re.search(rf"\b{name}\b", documented), name
    strategy = prepare(config(composer)).strategy
    assert isinstance(strategy.assigner, Observer)
    assert isinstance(strategy.assigner, Drafter)
    for part in PARTS:
        assert getattr(strategy, part).handles_generators


def test_options_of_the_yaml_are_all_fields_but_what_is_learnt(example: ModuleType) -> None:
    given = yaml.safe_load((FOLDER / "strategy" / "mine.yaml").read_text())
    for part in PARTS:
        node: dict[str, Any] = given[part]
        options = fields(getattr(example, node.pop("_target_").partition(".")[2]))
        assert node == {field.name: field.default for field in options if field.name != "pace"}


# Its parts


def test_longest_first_fills_microbatches_of_one_size_evenly(example: ModuleType) -> None:
    work_s = np.array([[5.0, 1], [4, 1], [3, 1], [3, 1], [2, 1], [1, 1]])
    microbatch = example.longest_first(work_s, 3)
    # 5 | 4 | 3, then 3 to 3, 2 to 4 and 1 to 5.
    assert microbatch.tolist() == [0, 1, 2, 2, 1, 0]
    assert example.loads_s(work_s, microbatch)[:, 0].tolist() == [6, 6, 6]


def test_exchanges_relieve_the_slowest_until_none_helps(example: ModuleType) -> None:
    work_s = np.array([[5.0], [4], [3], [2]])
    start = np.array([0, 0, 1, 1])
    assert example.exchanged(work_s, start, 8).tolist() in ([0, 1, 1, 0], [1, 0, 0, 1])
    assert example.exchanged(work_s, start, 0).tolist() == start.tolist()
    assert start.tolist() == [0, 0, 1, 1]
    generator = np.random.default_rng(0)
    work_s, start = generator.random((64, 2)), generator.permutation(np.arange(64) % 16)
    before, after = (example.loads_s(work_s, m).max() for m in (start, example.exchanged(work_s, start, 64)))
    assert after < 0.9 * before
    assert np.all(np.bincount(example.exchanged(work_s, start, 64)) == 4)


def test_the_lightest_microbatch_comes_first(example: ModuleType) -> None:
    work_s = np.array([[1.0], [9], [2], [3]])
    assert example.lightest_first(work_s, np.array([2, 1, 0, 0])).tolist() == [0, 2, 1, 1]


@pytest.mark.wide
def test_what_ran_slower_than_believed_weighs_more(composer: Composer) -> None:
    setting = prepare(config(composer))
    strategy, profile = setting.strategy, setting.profile
    layout = strategy.plan(profile)
    program = strategy.program(setting.source.batch(0, 64, 0), layout, profile)
    timeline = setting.executor.execute(program)  # type: ignore[union-attr]
    end_s = timeline.end_s.copy()
    # The LLM takes three times as long.
    llm = program.module == 1
    end_s[llm] += 2 * (timeline.end_s - timeline.start_s)[llm]
    slow = Timeline(program, timeline.start_s, end_s, timeline.comm_s, timeline.transfer_wait_s, end_s)
    learnt, slower = (strategy.observe(seen, profile).assigner for seen in (timeline, slow))
    assert strategy.assigner.pace == ()  # type: ignore[attr-defined]
    assert slower.pace == pytest.approx((learnt.pace[0], 3 * learnt.pace[1]))  # type: ignore[attr-defined]
    work_s, heavier_s = (one.stage_s(program.shapes, layout, profile) for one in (learnt, slower))  # type: ignore[attr-defined]
    assert heavier_s[:, 1] == pytest.approx(3 * work_s[:, 1])


@pytest.mark.parametrize(("num_ahead", "forwards"), [(0, [4, 3, 2, 1]), (2, [6, 5, 2, 1])])
def test_encoders_run_ahead_and_the_llm_does_not(example: ModuleType, num_ahead: int, forwards: list[int]) -> None:
    model = tiny_model(encoder=2, llm=2)
    layout = chain_layout(model, 2, 2, 12)
    shapes, assignment = uniform_batch(model, 12)
    profile = profile_of(tiny_job(model), shapes)
    program = example.EncodersAhead(num_ahead).schedule(shapes, layout, assignment, profile)
    check_program(program)
    before = [[action.kind for action in program.lane(lane)].index(Pass.BACKWARD) for lane in range(4)]
    assert before == forwards
