"""Keys of runs and of plans: whatever decides a result, or what a planner sees, gives other keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from entrain_bench.balancing.interface import Strategy
from entrain_bench.program.layout import layout_to_json
from entrain_bench.records.keys import identify, plan_key
from entrain_bench.records.sealed import CachedLayouts
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import run_experiment

pytestmark = pytest.mark.wide
SWEEP = ["model=tiny", "cluster=tiny,a40x16", "strategy=megatron,entrain", "seed=0,1"]


def keys(*overrides: str, config_dir: Path | None = None) -> list[str]:
    cells = compose_cells(overrides, config_dir and str(config_dir), multirun=True)
    assert [cell.key for cell in cells] == [identify(cell.config)[0] for cell in cells]
    return [cell.key for cell in cells]


def test_cells_of_a_sweep_have_keys_of_their_own_and_share_groups() -> None:
    cells = compose_cells(SWEEP, multirun=True)
    assert len({cell.key for cell in cells}) == 8
    assert cells[0].config.model is cells[1].config.model


def test_a_changed_yaml_gives_other_keys(tmp_path: Path) -> None:
    file = tmp_path / "mine" / "workload" / "theirs.yaml"
    file.parent.mkdir(parents=True)
    sweep, found = ("model=tiny", "workload=theirs", "seed=0,1"), []
    for share in (0.25, 0.75, 0.25):
        file.write_text(f"defaults: [uniform_mix, _self_]\nname: theirs\nvision_share: {share}\n")
        found.append(keys(*sweep, config_dir=file.parents[1]))
    before, after, back = found
    assert {*before}.isdisjoint(after)
    assert back == before


def test_a_changed_trace_gives_other_keys(tmp_path: Path) -> None:
    path, found = tmp_path / "mine.parquet", []
    for tokens in (100, 200):
        pd.DataFrame({"text_tokens": np.full(64, tokens, np.int32)}).to_parquet(path)
        found.append(keys("model=tiny", "workload=trace", f"workload.path={path}", "seed=0,1"))
    assert {*found[0]}.isdisjoint(found[1])


def test_what_follows_from_the_environment_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name in ("one", "two"):
        monkeypatch.setenv("THEIR_NAME", name)
        (cell, _) = compose_cells(["model=tiny", "strategy.name=${oc.env:THEIR_NAME}", "seed=0,1"], multirun=True)
        found.append(cell.config.strategy["name"])
    assert found == ["one", "two"]


WORKLOAD = '''

class Named:
    """A workload whose constructor takes a source."""

    def __init__(self, name, source):
        self.name = name

    def fingerprint(self):
        return ""

    def source(self, tokens):
        raise NotImplementedError
'''


def test_documentation_is_not_in_the_key_and_a_parameter_called_source_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose_cells(["model=tiny", "cluster=tiny"])[0].config
    documented = replace(config, model={**config.model, "source": "elsewhere"})
    assert identify(documented) == identify(config)
    (tmp_path / "named_workload.py").write_text(WORKLOAD)
    monkeypatch.syspath_prepend(tmp_path)
    target = {"name": "named", "_target_": "named_workload.Named"}
    keys = {identify(replace(config, workload={**target, "source": source}))[0] for source in ("a", "b")}
    assert len(keys) == 2


SMALL = ("workload=synthetic", "model=tiny", "cluster=tiny", "global_batch=16", "layout.tp=1", "layout.dp=2")


def key_of(*overrides: str) -> str:
    (cell,) = compose_cells([*SMALL, *overrides])
    return plan_key(cell.config)


def test_runs_share_a_plan_if_a_planner_cannot_tell_them_apart() -> None:
    same = key_of("strategy=entrain")
    assert key_of("strategy=entrain", "iterations=9") == same
    assert key_of("strategy=entrain", "strategy.name=mine") == same
    assert key_of("strategy=entrain", "harness=train") == same
    # A plan belongs to a job, not to a seed.
    assert key_of("strategy=entrain", "seed=1") == same
    others = (
        "planning_seed=1",
        "tuning=own",
        "tuning_budget=7",
        "tuning_options=false",
        "strategy.options.scheduler.memory=[module]",
        "global_batch=32",
        "microbatch_size=2",
        "layout.dp=1",
        "layout.recompute=[vision]",
        "belief_error=0.5",
        "memory_fraction=0.8",
        "freeze=[vision]",
        "cluster.device.kernel_launch_s=1e-3",
        "workload.modalities.image.llm_tokens.sigma=0.5",
        "strategy.planner.num_trials=2",
        "strategy.scheduler.eager=none",
        "strategy/assigner=megatron",
    )
    keys = {key_of("strategy=entrain", each) for each in others}
    assert len(keys) == len(others)
    assert same not in keys


def test_a_plan_is_made_once_and_its_time_is_that_of_the_run_that_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cell,) = compose_cells([*SMALL, "strategy=megatron", "iterations=1"])
    plans = CachedLayouts(tmp_path)
    first = run_experiment(cell.config, plans=plans)

    def plan(*_: object) -> None:
        raise AssertionError("planned again")

    with monkeypatch.context() as patch:
        patch.setattr(Strategy, "plan", plan)
        again = run_experiment(cell.config, plans=plans)
    assert layout_to_json(first.layout) == layout_to_json(again.layout)
    for name in ("planning_time_s", "lower_bound_s", "bubble_ratio", "peak_memory_bytes"):
        assert first.metrics[name] == again.metrics[name]
