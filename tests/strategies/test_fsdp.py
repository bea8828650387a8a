"""FSDP's planner: degrees of one stage, what is refused, and which layout wins; VeOmni's assigner on its layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from entrain_bench.balancing.interface import Strategy
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arrays import IntArray
from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare
from entrain_bench.specs.job import Job
from entrain_bench_strategies.fsdp import FsdpPlanner, sharded_degrees, sharded_job

SMALL = (
    "model=tiny",
    "cluster=tiny",
    "global_batch=16",
    "microbatch_size=2",
    "workload=synthetic",
    "layout.tp=null",
    "layout.dp=null",
)


def setting(*overrides: str) -> tuple[Job, Profile, Strategy]:
    made = prepare(compose_cells([*SMALL, *overrides])[0].config)
    return made.job, made.profile, made.strategy


def triples(job: Job) -> list[tuple[int, int, int]]:
    return [(degrees.tp, degrees.cp, degrees.dp) for degrees in sharded_degrees(job)]


def test_dp_is_what_tp_and_cp_leave_and_a_multiple_of_what_is_asked_for() -> None:
    job, _, _ = setting("strategy=fsdp", "layout.cp=1")
    assert triples(job) == [(1, 1, 4), (2, 1, 2), (4, 1, 1)]
    asked = replace(job, request=replace(job.request, dp=2))
    assert triples(asked) == [(1, 1, 4), (2, 1, 2)]
    default = prepare(compose_cells(["strategy=fsdp"])[0].config).job
    with pytest.raises(IncompatibleError, match=r"^layout\.dp=4: must be null or 32 with layout.cp=1"):
        sharded_job(default)
    free_tp = sharded_job(replace(default, request=replace(default.request, tp=None, dp=32)))
    assert triples(free_tp) == [(2, 1, 32)]


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["layout.pp=2"], IncompatibleError, r"layout.pp=2: must be 1 or null with sharded weights"),
        (["encoder_optimizers=2"], IncompatibleError, r"encoder_optimizers=2: must be 1 with sharded weights"),
        (
            ["layout.tp=2", "layout.dp=4", "layout.cp=1"],
            IncompatibleError,
            r"layout.dp=4: must be null or 2 with",
        ),
        (
            ["layout.dp=3", "layout.cp=1"],
            IncompatibleError,
            r"layout.dp=3: must be null or 4 or 2 or 1 with",
        ),
        (["strategy.planner.num_trials=0"], UserError, r"strategy.planner.num_trials=0: must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(overrides: Sequence[str], error: type[UserError], message: str) -> None:
    def plan() -> None:
        _, profile, strategy = setting("strategy=fsdp", *overrides)
        strategy.plan(profile)

    with pytest.raises(error, match=message) as caught:
        plan()
    assert "\n" not in str(caught.value)


def test_every_module_is_sharded_on_all_ranks_in_one_stage() -> None:
    _, profile, strategy = setting("strategy=fsdp", "model=tiny_av", "workload=synthetic_av")
    assert isinstance(strategy.planner, FsdpPlanner)
    layout = strategy.plan(profile)
    assert all(module.sharded and module.pp == 1 and module.ranks.size == 4 for module in layout.modules)


def spread(values: IntArray, replica: IntArray, row: IntArray) -> float:
    """Fullest replica of every row, summed."""
    table = np.zeros((row.max() + 1, 4))
    np.add.at(table, (row, replica), values)
    return float(table.max(axis=1).sum())


def test_veomni_moves_items_within_their_micro_step_and_leaves_samples() -> None:
    job, profile, strategy = setting("strategy=veomni", "layout.tp=1", "layout.cp=1")
    layout, plain = strategy.plan(profile), setting("strategy=fsdp")[2]
    shapes = profile.samples.draw(job.global_batch)
    ours, arrived = (each.assigner.assign(shapes, layout, profile) for each in (strategy, plain))
    np.testing.assert_array_equal(ours.modules[-1].replica, arrived.modules[-1].replica)
    np.testing.assert_array_equal(ours.modules[0].microbatch, arrived.modules[0].microbatch)
    tokens = job.model.encoders[0].lengths(shapes, job.model.encoders[0].units(shapes))
    row = ours.modules[0].microbatch
    assert spread(tokens**2, ours.modules[0].replica, row) < spread(tokens**2, arrived.modules[0].replica, row)
