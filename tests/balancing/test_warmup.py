"""Extra forwards before 1F1B alternates: capped, within memory, and the same option for every 1F1B strategy."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.schedules import OneForwardOneBackward
from entrain_bench.program import Pass, Program
from entrain_bench.program.layout import Layout
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import RunContext, prepare
from entrain_bench.simulate import place_actions
from support.builders import chain_layout, no_delay, profile_of, tiny_job, tiny_model, uniform_batch

MODEL = tiny_model(encoder=4, llm=4)
SMALL = ("workload=synthetic", "model=tiny", "cluster=tiny", "global_batch=64", "layout.tp=1", "layout.dp=1")
# All but those whose modules share their ranks: their encoders run in phases of their own or wherever they fit.
CHAINS = (
    "bridge_reorder",
    "dflop",
    "disttrain",
    "entrain",
    "hetero_noncolocated",
    "length_grouped",
    "megatron",
    "megatron_rigid",
    "omnibal",
    "token_budget",
)


def scheduled(scheduler: OneForwardOneBackward, budget_bytes: float = 1e15, count: int = 12) -> tuple[Program, Profile]:
    layout = chain_layout(MODEL, 2, 2, count)
    shapes, assignment = uniform_batch(MODEL, count)
    profile = profile_of(tiny_job(MODEL, budget_bytes=budget_bytes), shapes)
    return scheduler.schedule(shapes, layout, assignment, profile), profile


def leading_forwards(program: Program) -> list[int]:
    """Forwards of every lane before its first backward."""
    lanes = [program.lane_actions[low:high] for low, high in pairwise(program.lane_offsets)]
    return [int(np.argmax(program.kind[lane] == Pass.BACKWARD)) for lane in lanes]


@pytest.mark.parametrize(
    ("eager", "most", "extra"),
    [
        ("none", 3, [0, 0, 0, 0]),
        ("encoder", 0, [0, 0, 0, 0]),
        ("encoder", 3, [3, 3, 0, 0]),
        ("all", 3, [3, 3, 3, 3]),
        # 12 microbatches: eleven, ten, ... forwards ahead of the one that its backward follows.
        ("encoder", None, [8, 8, 0, 0]),
        ("all", 100, [8, 8, 8, 8]),
    ],
)
def test_extra_forwards_are_capped_where_memory_is_no_limit(eager: str, most: int | None, extra: list[int]) -> None:
    program, _ = scheduled(OneForwardOneBackward(eager, most))
    assert leading_forwards(program) == [1 + behind + more for behind, more in zip([3, 2, 1, 0], extra, strict=True)]
    place_actions(program, np.ones(program.num_actions), no_delay(program))


@cache
def planned(strategy: str) -> tuple[RunContext, Layout]:
    (cell,) = compose_cells([*SMALL, f"strategy={strategy}"])
    setting = prepare(cell.config)
    return setting, setting.strategy.plan(setting.profile)


@pytest.mark.wide
@pytest.mark.parametrize("strategy", CHAINS)
def test_every_1f1b_strategy_runs_ahead_as_far_as_it_is_told(strategy: str) -> None:
    setting, layout = planned(strategy)
    shapes = setting.source.batch(0, setting.job.global_batch, 0)
    leading = {}
    for most in (0, 1, 2):
        overrides = (
            f"strategy={strategy}",
            "strategy.scheduler.eager=all",
            f"strategy.scheduler.max_extra_forwards={most}",
        )
        (cell,) = compose_cells([*SMALL, *overrides])
        parts = prepare(cell.config).strategy
        assert isinstance(parts.scheduler, OneForwardOneBackward)
        program = parts.program(shapes, layout, setting.profile)
        setting.profile.trial_s(program)
        leading[most] = np.array(leading_forwards(program))
    assert np.all(leading[0] <= leading[1])
    assert np.all(leading[1] <= leading[2])
    assert leading[0].sum() < leading[1].sum() < leading[2].sum()
