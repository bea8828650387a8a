"""Options of strategies' parts: a wrong one is refused by its key and value."""

from __future__ import annotations

import re
from typing import Any

import pytest

from entrain_bench.balancing.warmup import WarmUp
from entrain_bench.base.errors import UserError
from entrain_bench_strategies.braid import BraidAssigner, BraidPlanner, BraidScheduler
from entrain_bench_strategies.bridge_reorder import PatchBalance
from entrain_bench_strategies.dflop import Corrector
from entrain_bench_strategies.dip import DipAssigner, DipPlanner, DipScheduler
from entrain_bench_strategies.disttrain import DistTrainAssigner
from entrain_bench_strategies.dynapipe import DynaPipeAssigner, DynaPipeScheduler
from entrain_bench_strategies.entrain import EntrainPlanner, EntrainScheduler
from entrain_bench_strategies.hetero import BatchSlices, ColocatedPlanner, NoncolocatedPlanner
from entrain_bench_strategies.length_grouped import LengthGrouped
from entrain_bench_strategies.mdp import SpreadItems
from entrain_bench_strategies.megatron import MegatronPlanner
from entrain_bench_strategies.megatron_rigid import RigidPlanner
from entrain_bench_strategies.omnibal import OmniBalAssigner, OmniBalPlanner
from entrain_bench_strategies.orchmllm import PostBalancing
from entrain_bench_strategies.token_budget import TokenBudget

# Each option with the values that are refused.
WRONG: dict[type, dict[str, list[Any]]] = {
    BraidPlanner: {"num_trials": [0], "spans": [(1,)], "microbatches": [()], "overhead": [1.0]},
    BraidAssigner: {"overhead": [0]},
    BraidScheduler: {"rollouts": [-1], "llm_leads": [(-1,)]},
    PatchBalance: {"encoder_weight": [-1.0]},
    Corrector: {"window": [0], "tolerance": [-1.0], "cost_s": [-1.0], "smoothing": [0.0]},
    DipPlanner: {"profile_samples": [0], "chunks": ["two"], "efficiency": [0.0]},
    DipAssigner: {"efficiency": [0.0, 1.5]},
    DipScheduler: {
        "memory": ["none"],
        "priorities": ["none"],
        "search_rounds": [-1, 2**63],
        "search_seconds": [-1.0],
    },
    DistTrainAssigner: {"intra": ["globl_batch"], "carry": [True]},
    DynaPipeAssigner: {"order": ["size"], "limit_step": [0.0]},
    DynaPipeScheduler: {"method": ["gpipe"], "classes": [6], "memory": ["all"]},
    EntrainPlanner: {"profile_samples": [0], "confidence_error": [0.0], "allocation_error": [1.0], "max_samples": [0]},
    EntrainScheduler: {"eager": ["encoders"]},
    ColocatedPlanner: {"profile_samples": [0], "num_trials": [0]},
    NoncolocatedPlanner: {"encoder_ranks": [0], "max_encoder_pp": [0]},
    BatchSlices: {"encoder_passes": [0]},
    LengthGrouped: {"rule": ["sorted"], "length": ["words"], "mega_batch_mult": [0], "shuffle_seed": [-1]},
    SpreadItems: {"locality_slack_permille": [1000], "max_pass_tokens": [0]},
    MegatronPlanner: {
        "placement": ["first"],
        "profile_samples": [0],
        "num_trials": [0],
        "split": ["even"],
        "virtual_stages": [0],
        "virtual_order": ["w"],
    },
    RigidPlanner: {"placement": ["auto"], "outer_stages": [0]},
    OmniBalAssigner: {"threshold": [1.5], "rounds": [0], "seed": [-1]},
    OmniBalPlanner: {"profile_samples": [0], "radius": [-1], "num_trials": [0]},
    PostBalancing: {"cost": ["cubic"], "padded": ["vision"]},
    TokenBudget: {"rule": ["best_fit"], "counted": ["images"], "max_tokens": [0]},
    WarmUp: {"max_extra_forwards": [-1]},
}
# Options that are wrong together, the named one last.
TOGETHER: list[tuple[type, dict[str, Any], str]] = [
    (PatchBalance, {"llm_weight": 0.0, "encoder_weight": 0.0}, "encoder_weight=0.0"),
    (OmniBalAssigner, {"max_text_tokens": 1, "max_vision_tokens": 0}, "max_vision_tokens=0"),
    (OmniBalAssigner, {"max_text_tokens": 5}, "max_vision_tokens=None"),
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
