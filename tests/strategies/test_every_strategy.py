"""Every strategy: what a user asks of a layout, models of any number of encoders, text alone, wrong options."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import numpy as np
import pytest

from entrain_bench.balancing.planning import recompute_choices
from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.config.compose import compose
from entrain_bench.config.targets import instantiate
from entrain_bench.config.tree import choices
from entrain_bench.program.layout import Layout
from entrain_bench.program.validate import check_program
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare
from entrain_bench.specs.job import LayoutRequest
from support.builders import profile_of, random_samples, samples, tiny_cluster, tiny_job, tiny_model
from support.wide import each, each_strategy, own_dp

SMALL = ("workload=synthetic", "model=tiny", "cluster=tiny", "global_batch=16", "layout.tp=1", "layout.dp=2")
# One has no estimates, so nothing to try.
TRYING = [name for name in choices("strategy") if name != "megatron_rigid"]
# Whose microbatches are as many as their samples need; of these, the size decides what they hold.
OWN_NUMBER = ("bytescale", "hybrid_cp", "omnibal", "token_budget")
# Whose microbatches have nothing to do with it.
OWN_SIZE = ("braid", "dflop", "dynapipe", "flexsp", "lpt", "lpt_widths")
TEXT = samples(*((10 * length, []) for length in range(1, 17)))


def planned(*overrides: str) -> Layout:
    (cell,) = compose_cells([*SMALL, *overrides])
    setting = prepare(cell.config)
    return setting.strategy.plan(setting.profile)


@pytest.mark.wide
@pytest.mark.parametrize("asked", ["[]", "[vision]", "[llm]", "[vision,llm]"])
@pytest.mark.parametrize("strategy", each_strategy())
def test_every_planner_recomputes_what_is_asked_for_and_nothing_else(strategy: str, asked: str) -> None:
    layout = planned(f"strategy={strategy}", *own_dp(strategy), f"layout.recompute={asked}")
    assert {placed.module for placed in layout.modules if placed.recompute} == {*filter(None, asked[1:-1].split(","))}


def test_modules_that_share_their_ranks_recompute_together_or_not_at_all() -> None:
    model = tiny_model(audio=2)
    groups = model.module_groups
    names = [module.name for module in model.modules]

    def asked_for(*recompute: str) -> list[tuple[bool, ...]]:
        return recompute_choices(tiny_job(model, request=LayoutRequest(recompute=recompute)), groups)

    assert asked_for(*names[:2]) == [(True, False)]
    assert recompute_choices(tiny_job(model), groups) == [*product([False, True], repeat=2)]
    with pytest.raises(IncompatibleError, match=r"layout\.recompute=.* all modules of a rank, or none"):
        asked_for(names[0])


@pytest.mark.wide
@pytest.mark.parametrize("strategy", each(name for name in TRYING if name not in OWN_SIZE))
def test_a_free_microbatch_size_is_chosen_and_every_part_follows_it(strategy: str) -> None:
    # Launches are so dear that the least microbatches are the worst, which trials tell if estimates do not.
    dear = ("cluster.device.kernel_launch_s=1e-2", "strategy.planner.num_trials=5")
    (cell,) = compose_cells([*SMALL, *own_dp(strategy), f"strategy={strategy}", "microbatch_size=null", *dear])
    setting = prepare(cell.config)
    layout = setting.strategy.plan(setting.profile)
    llm = setting.job.model.llm_index
    size, rest = divmod(setting.job.global_batch, layout.num_microbatches * layout.modules[llm].dp)
    assert not rest
    assert size in (2, 4, 8, 16)
    program = setting.strategy.program(setting.source.batch(0, setting.job.global_batch, 0), layout, setting.profile)
    if strategy not in OWN_NUMBER:
        assert 1 + program.chunks[llm].microbatch.max() <= layout.num_microbatches
    assert setting.profile.under(layout).job.microbatch_size == size


@pytest.mark.parametrize(("encoder", "audio"), [(0, 0), (2, 0), (2, 2)])
@pytest.mark.parametrize("strategy", each_strategy())
def test_programs_are_valid_and_within_memory(strategy: str, encoder: int, audio: int) -> None:
    parts = prepare(compose(f"strategy={strategy}", "model=tiny", "cluster=tiny")).strategy
    request = LayoutRequest(tp=1, cp=1, dp=None if own_dp(strategy) else 2)
    model = tiny_model(encoder, 4, audio)
    job = tiny_job(model, tiny_cluster(1, 8), global_batch=16, microbatch_size=2, request=request)
    mixed = random_samples(np.random.default_rng(0), 16) if encoder else TEXT
    profile = profile_of(job, mixed)
    try:
        layout = parts.plan(profile)
    except IncompatibleError:
        pytest.skip("the strategy needs another number of encoders")
    for shapes in (mixed, TEXT):
        program = parts.program(shapes, layout, profile)
        check_program(program)
        assert profile.memory.peak_bytes(program).max() <= job.memory_budget_bytes


# Of each part the options with values that are refused, and the key and value that the error names.
WRONG: dict[str, dict[str, list[Any]]] = {
    "braid.BraidPlanner": {"num_trials": [0], "virtual_stages": [[]]},
    "bytescale.HybridData": {"buckets": [0]},
    "dip.DipPlanner": {"profile_samples": [0], "chunks": ["two"]},
    "dip.DipScheduler": {"memory": ["none"], "priorities": ["none"], "search_rounds": [-1, 2**63]},
    "disttrain.DistTrainAssigner": {"intra": ["globl_batch"], "carry": [True]},
    "dynapipe.DynaPipeAssigner": {"order": ["size"]},
    "dynapipe.DynaPipeScheduler": {"memory": ["all"]},
    "entrain.EntrainPlanner": {"profile_samples": [0], "encoder_stages": [0]},
    "entrain.EntrainScheduler": {"eager": ["encoders"], "max_extra_forwards": [-1]},
    "hetero.NoncolocatedPlanner": {"encoder_ranks": [0], "profile_samples": [0], "num_trials": [0]},
    "hetero.BatchSlices": {"encoder_passes": [0]},
    "mdp.BalancedVision": {"load": ["tokens"], "pass_tokens": [0]},
    "practice.LengthGrouped": {"rule": ["sorted"]},
    "megatron.MegatronPlanner": {"placement": ["first"], "virtual_stages": [0], "virtual_order": ["w"]},
    "megatron_rigid.RigidPlanner": {"placement": ["auto"], "virtual_stages": [1]},
    "omnibal.OmniBalAssigner": {"rounds": [0]},
    "orchmllm.PostBalancing": {"cost": ["cubic"], "padded": ["vision"]},
    "practice.TokenBudget": {"rule": ["best_fit"], "counted": ["images"], "max_tokens": [0]},
    "fsdp.EncoderBalance": {"cost_exponent": [3]},
}
# Options that are wrong together or in a list, and what the error names.
OTHERS: list[tuple[str, dict[str, Any], str]] = [
    ("braid.BraidPlanner", {"virtual_stages": [0]}, "virtual_stages[0]=0"),
    ("dflop.DflopAssigner", {"correction": {"_target_": "dflop.Corrector", "window": 0}}, "correction.window=0"),
    ("dflop.DflopPlanner", {"microbatches": "released", "num_microbatches": 2}, "num_microbatches=2"),
    ("megatron.MegatronPlanner", {"split": "uniform", "placement": "leading_stages"}, "placement=leading_stages"),
    ("megatron.MegatronPlanner", {"virtual_order": "v"}, "virtual_stages=1"),
    ("megatron.MegatronPlanner", {"schedules": ["1f1b", "zb"]}, "schedules[1]=zb"),
]


SINGLE = [
    (part, {name: value}, f"{name}={value}")
    for part, options in WRONG.items()
    for name, values in options.items()
    for value in values
]


def targeted(part: str, options: dict[str, Any]) -> dict[str, Any]:
    nested = {
        key: targeted(value["_target_"], value) if isinstance(value, dict) else value for key, value in options.items()
    }
    return nested | {"_target_": f"entrain_bench_strategies.{part}"}


@pytest.mark.parametrize(("part", "options", "named"), [*SINGLE, *OTHERS])
def test_a_wrong_option_is_named(part: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=rf"^part\.{re.escape(named)}: |^strategy\.\w+\.{re.escape(named)}: "):
        instantiate(targeted(part, options), "part", ("plan", "assign", "schedule"))
