"""What every strategy must do on every workload, whatever it is."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import experiments
from entrain_bench.compose import compose_cells
from entrain_bench.config import RunConfig
from entrain_bench.errors import IncompatibleError
from entrain_bench.experiment import run_experiment
from entrain_bench.records import METRICS

TREE = Path(experiments.__path__[0])


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (TREE / group).glob("*.yaml"))


NEEDS_AUDIO = ("librispeech", "synthetic_av")
WORKLOADS = [name for name in choices("workload") if name != "trace"]
MODELS = ("tiny", "tiny_av")
CLUSTERS = ("tiny", "a40x16")


@cache
def composed(*overrides: str) -> RunConfig:
    small = ["global_batch=16", "microbatch_size=2", "layout.tp=1", "layout.dp=2", "iterations=1"]
    return compose_cells([*small, *overrides])[0].config


def config(**chosen: str) -> RunConfig:
    """The run with the given choice of each group, each composed once: composing takes longer than a tiny run."""
    groups = {group: getattr(composed(f"{group}={name}"), group) for group, name in chosen.items()}
    return replace(composed(), **groups)


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("strategy", choices("strategy"))
def test_valid_within_memory_above_the_bound_and_repeatable(
    strategy: str, workload: str, model: str, cluster: str
) -> None:
    run = config(strategy=strategy, workload=workload, model=model, cluster=cluster)
    try:
        # Executing validates the program, its order and its memory.
        first = run_experiment(run)
    except IncompatibleError:
        assert workload in NEEDS_AUDIO
        assert model == "tiny"
        return
    assert set(first.metrics) == set(METRICS)
    assert first.metrics["gap_to_lower_bound"] >= 0
    assert 0 <= first.metrics["bubble_ratio"] < 1
    assert first.metrics["planning_time_s"] > 0
    assert first.metrics["assignment_time_s"] > 0
    if cluster != CLUSTERS[0]:
        return
    again = run_experiment(run)
    # Throughput may hold the wall time of an assignment slower than these tiny iterations; the timeline may not.
    assert first.timeline is not None
    assert again.timeline is not None
    pd.testing.assert_frame_equal(first.timeline, again.timeline)
    assert first.metrics["lower_bound_s"] == again.metrics["lower_bound_s"]
    wrong = run_experiment(replace(run, belief_error=0.2))
    assert wrong.metrics["gap_to_lower_bound"] >= 0


def mixes() -> list[object]:
    """Every planner with every assigner and scheduler; those of three different systems are for make test-slow."""
    found: list[object] = []
    for parts in product(*(choices(f"strategy/{part}") for part in ("planner", "assigner", "scheduler"))):
        marks = [pytest.mark.slow] if len(set(parts)) == 3 else []
        found.append(pytest.param(*parts, marks=marks, id="-".join(parts)))
    return found


@pytest.mark.parametrize(("planner", "assigner", "scheduler"), mixes())
def test_parts_can_be_mixed(planner: str, assigner: str, scheduler: str) -> None:
    parts: Mapping[str, Any] = {
        part: composed(f"strategy/{part}={name}").strategy[part]
        for part, name in (("planner", planner), ("assigner", assigner), ("scheduler", scheduler))
    }
    run = config(model="tiny", cluster="a40x16")
    try:
        outcome = run_experiment(replace(run, strategy={"name": "mixed", **parts}))
    except IncompatibleError:
        assert len({planner, assigner, scheduler}) > 1, "the parts of one system fit together"
        return
    assert outcome.metrics["gap_to_lower_bound"] >= 0


@pytest.mark.parametrize("model", choices("model"))
@pytest.mark.parametrize("cluster", choices("cluster"))
def test_every_model_runs_on_every_cluster_that_holds_it(model: str, cluster: str) -> None:
    workload = "librispeech" if "vl" not in model and "tiny" not in model else "chartqa"
    searched = ["layout.tp=null", "layout.dp=null", "layout.cp=1", "strategy=megatron"]
    batch = ["global_batch=64", "microbatch_size=1"]
    run = replace(
        composed(*batch, *searched),
        model=composed(f"model={model}").model,
        cluster=composed(f"cluster={cluster}").cluster,
        workload=composed(f"workload={workload}").workload,
    )
    outcome = run_experiment(run)
    assert outcome.layout.num_ranks == int(run.cluster["num_nodes"]) * int(run.cluster["gpus_per_node"])
