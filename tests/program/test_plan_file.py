"""Plans as files: what is written is read, and whatever is wrong is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from entrain_bench.base.errors import UserError
from entrain_bench.cli import run_command
from entrain_bench.config.compose import compose
from entrain_bench.program.layout import layout_to_json
from entrain_bench.program.plan_file import Expected, PlannedJob, TrainingPlan, plan_overrides, plan_text, read_plan
from entrain_bench.records.keys import identify, plan_key
from entrain_bench.run.experiment import prepare, run_experiment
from entrain_bench.sampler import BalancedBatchSampler

TINY = ("layout.tp=1", "layout.dp=2", "iterations=1")
JOB = PlannedJob("tiny", "synthetic", "tiny", 8, 2, 3, ("iterations=1",))
OPTIONS = ("strategy.assigner.defer=false",)


@pytest.fixture(scope="module")
def plan() -> TrainingPlan:
    setting = prepare(
        compose("strategy=entrain", "model=tiny", "cluster=tiny", "global_batch=8", "microbatch_size=2", *TINY)
    )
    layout = setting.strategy.plan(setting.profile)
    return TrainingPlan("entrain", OPTIONS, JOB, layout, Expected(1.0, 0.9, 1.1, 3))


@pytest.fixture
def file(plan: TrainingPlan, tmp_path: Path) -> Path:
    path = tmp_path / "it's a plan.yaml"
    path.write_text(plan_text(plan))
    return path


def test_what_is_written_is_read(plan: TrainingPlan, file: Path) -> None:
    found = read_plan(file)
    assert layout_to_json(found.layout) == layout_to_json(plan.layout)
    assert (found.strategy, found.options, found.job, found.expected) == ("entrain", OPTIONS, JOB, plan.expected)
    assert plan_text(found) == plan_text(plan)


def test_groups_of_several_widths_are_read_and_run(tmp_path: Path) -> None:
    overrides = ("layout.tp=1", "layout.pp=1", "layout.cp=null", "layout.dp=null")
    job = PlannedJob("tiny", "synthetic", "tiny", 8, 2, 3, overrides)
    setting = prepare(
        compose("strategy=hybrid_cp", "model=tiny", "cluster=tiny", "global_batch=8", "microbatch_size=2", *overrides)
    )
    layout = setting.strategy.plan(setting.profile)
    path = tmp_path / "plan.yaml"
    path.write_text(plan_text(TrainingPlan("hybrid_cp", (), job, layout, Expected(1.0, 0.9, 1.1, 3))))
    found = read_plan(path)
    widths = [placed.widths for placed in found.layout.modules]
    assert layout_to_json(found.layout) == layout_to_json(layout)
    assert len(widths[0]) > 1
    outcome = run_experiment(compose(f"plan={path}"))
    assert layout_to_json(outcome.layout) == layout_to_json(layout)


def changed(file: Path, place: str, value: Any) -> None:
    """The file with one of its values exchanged; None removes it."""
    values = node = yaml.safe_load(file.read_text())
    *path, last = place.split(".")
    for key in path:
        node = node[int(key)] if key.isdigit() else node[key]
    if value is None:
        del node[last]
    else:
        node[last] = value
    file.write_text(yaml.safe_dump(values))


@pytest.mark.wide
@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        ("version", 2, "version=2: must be 1"),
        ("version", None, "version=None: must be 1"),
        ("strategy", 3, "plan.strategy=3: must be text"),
        ("strategi", "x", "plan key=strategi: unknown (did you mean strategy?)"),
        ("options", ["defer"], "options=defer: must be key=value"),
        ("job", [], "plan.job=[]: must be a mapping"),
        ("job.global_batch", 0, "plan.job.global_batch=0: must be at least 1"),
        ("job.seed", -1, "plan.job.seed=-1: must be in 0..2^32-1"),
        ("job.overrides", ["x"], "job.overrides=x: must be key=value"),
        ("expected.iteration_time_s", -1.0, "plan.expected.iteration_time_s=-1.0: must be positive"),
        ("layout.modules", [], "layout.modules=[]: must be at least one"),
        ("layout.split_backward", "no", "layout.split_backward=no: must be true or false"),
        ("layout.modules.1.layers_per_stage", [], "layout.modules[1].layers_per_stage=[]: must be at least 1 on each"),
        ("layout.modules.1.layers_per_stage", [5, 5], "layout.modules[1].ranks="),
        ("layout.modules.0.ranks", [[[0], [1, 2]]], "layout.modules[0].ranks="),
        ("layout.modules.0.ranks", "all", "layout.modules[0].ranks=all: must be [replica][1 stages][1 ranks]"),
        ("layout.modules.0.recompute", "yes please", "layout.modules[0].recompute=yes please: must be true or false"),
        ("layout.modules.0.widths", [[0, 1]], "layout.modules[0].widths=[0, 1]: must be TP and CP of a group, both at"),
        ("layout.modules.0.pp", 3, "layout.modules[0] key=pp: unknown"),
    ],
)
def test_every_wrong_field_is_one_line(file: Path, place: str, value: Any, says: str) -> None:
    changed(file, place, value)
    with pytest.raises(UserError) as caught:
        read_plan(file)
    assert str(caught.value).startswith(f"plan={file}: {says}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "says"), [("a: [", "not YAML: "), ("7", "plan=7: must be a mapping")])
def test_what_is_no_plan_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=says):
        read_plan(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_plan(tmp_path / "nowhere.yaml")


def test_what_a_file_says_is_part_of_a_runs_key(file: Path) -> None:
    overrides = plan_overrides(read_plan(file), file)
    before = compose(*overrides)
    keys = identify(before)[0], plan_key(before)
    changed(file, "layout.num_microbatches", 4)
    after = compose(*overrides)
    assert identify(after)[0] != keys[0]
    assert plan_key(after) != keys[1]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["layout.tp=2"], "layout.tp=2: the plan decides it (plan="),
        (["strategy.planner.path=x"], "strategy.planner.path=x: the plan decides it (plan="),
        (["microbatch_size=1"], "microbatch_size=1: the plan decides it (plan="),
        (["plan=other.yaml"], "plan=other.yaml: plan must be given once"),
        (["cluster=a40x64", "model=qwen25vl_llama3_1b"], "layout.vision.layers_per_stage=10: must be 34 layers in all"),
    ],
)
def test_what_a_plan_decides_cannot_be_given(
    plan: TrainingPlan, tmp_path: Path, more: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(plan_text(plan))
    assert run_command([f"plan={path}", *more, f"results_dir={tmp_path}", "mlflow=false"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"entrain-bench: {says}")


@pytest.mark.wide
def test_a_sampler_follows_a_plan(file: Path, tmp_path: Path) -> None:
    import pandas as pd

    trace = tmp_path / "mine.parquet"
    pd.DataFrame({"text_tokens": [10 + 7 * (row % 5) for row in range(20)]}).to_parquet(trace)
    one = BalancedBatchSampler.from_plan(trace, file, rank=0, world_size=2)
    assert layout_to_json(one.layout) == layout_to_json(read_plan(file).layout)
    assert (one.global_batch, one.num_microbatches, one.num_iterations) == (8, 2, 2)
    both = [index for rank in range(2) for row in one.microbatches(0, rank=rank) for index in row]
    assert len({*both}) == 8
    with pytest.raises(UserError, match="world_size=4: must be 2, the number of LLM replicas of the layout"):
        BalancedBatchSampler.from_plan(trace, file, rank=0, world_size=4)
