"""Options of strategies' parts: a wrong one is refused by its key and value."""

from __future__ import annotations

import re
from typing import Any

import pytest

from entrain_bench.balancing.schedules import OneForwardOneBackward
from entrain_bench.base.errors import UserError
from entrain_bench_strategies.braid import BraidPlanner, BraidScheduler
from entrain_bench_strategies.dflop import Corrector
from entrain_bench_strategies.dip import DipPlanner, DipScheduler
from entrain_bench_strategies.disttrain import DistTrainAssigner
from entrain_bench_strategies.dynapipe import DynaPipeAssigner, DynaPipeScheduler
from entrain_bench_strategies.entrain import EntrainPlanner, EntrainScheduler
from entrain_bench_strategies.hetero import BatchSlices, ColocatedPlanner, NoncolocatedPlanner
from entrain_bench_strategies.length_grouped import LengthGrouped
from entrain_bench_strategies.megatron import MegatronPlanner
from entrain_bench_strategies.megatron_rigid import RigidPlanner
from entrain_bench_strategies.omnibal import OmniBalAssigner, OmniBalPlanner
from entrain_bench_strategies.orchmllm import PostBalancing
from entrain_bench_strategies.token_budget import TokenBudget

# Each option with the values that are refused.
WRONG: dict[type, dict[str, list[Any]]] = {
    BraidPlanner: {"num_trials": [0], "spans": [(1,)], "microbatches": [()]},
    BraidScheduler: {"rollouts": [-1], "llm_leads": [(-1,)]},
    Corrector: {"window": [0], "tolerance": [-1.0], "cost_s": [-1.0], "smoothing": [0.0]},
    DipPlanner: {"profile_samples": [0], "chunks": ["two"]},
    DipScheduler: {
        "memory": ["none"],
        "priorities": ["none"],
        "search_rounds": [-1, 2**63],
    },
    DistTrainAssigner: {"intra": ["globl_batch"], "carry": [True]},
    DynaPipeAssigner: {"order": ["size"]},
    DynaPipeScheduler: {"method": ["gpipe"], "memory": ["all"]},
    EntrainPlanner: {"profile_samples": [0], "encoder_stages": [0]},
    EntrainScheduler: {"eager": ["encoders"]},
    ColocatedPlanner: {"profile_samples": [0], "num_trials": [0]},
    NoncolocatedPlanner: {"encoder_ranks": [0]},
    BatchSlices: {"encoder_passes": [0]},
    LengthGrouped: {"rule": ["sorted"]},
    MegatronPlanner: {
        "placement": ["first"],
        "profile_samples": [0],
        "num_trials": [0],
        "split": ["even"],
        "virtual_stages": [0],
        "virtual_order": ["w"],
    },
    RigidPlanner: {"placement": ["auto"], "outer_stages": [0]},
    OmniBalAssigner: {"rounds": [0]},
    OmniBalPlanner: {"profile_samples": [0], "num_trials": [0]},
    PostBalancing: {"cost": ["cubic"], "padded": ["vision"]},
    TokenBudget: {"rule": ["best_fit"], "counted": ["images"], "max_tokens": [0]},
    OneForwardOneBackward: {"max_extra_forwards": [-1]},
}
# Options that are wrong together, the named one last.
TOGETHER: list[tuple[type, dict[str, Any], str]] = [
    (MegatronPlanner, {"split": "uniform", "placement": "leading_stages"}, "placement=leading_stages"),
    (MegatronPlanner, {"virtual_order": "v"}, "virtual_stages=1"),
    (MegatronPlanner, {"schedules": ["1f1b", "zb"]}, "schedules=zb"),
]


def single() -> list[tuple[type, dict[str, Any], str]]:
    return [
        (part, {name: value}, f"{name}={[*value] if isinstance(value, tuple) else value}")
        for part, options in WRONG.items()
        for name, values in options.items()
        for value in values
    ]


@pytest.mark.parametrize(("part", "options", "named"), [*single(), *TOGETHER])
def test_a_wrong_option_is_named(part: type, options: dict[str, Any], named: str) -> None:
    with pytest.raises(
        UserError, match=rf"strategy\.(planner|assigner|assigner\.correction|scheduler)\.{re.escape(named)}: "
    ):
        part(**options)
