"""Plans of earlier runs: found by what a planner sees, used once, and never trusted blindly."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrain_bench.balancing.interface import Strategy
from entrain_bench.program.layout import layout_to_json
from entrain_bench.records.keys import plan_key
from entrain_bench.records.sealed import CachedLayouts
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import run_experiment

SMALL = ("workload=synthetic", "model=tiny", "cluster=tiny", "global_batch=16", "layout.tp=1", "layout.dp=2")


def key_of(*overrides: str) -> str:
    (cell,) = compose_cells([*SMALL, *overrides])
    return plan_key(cell.config)


@pytest.mark.wide
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


@pytest.mark.wide
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
