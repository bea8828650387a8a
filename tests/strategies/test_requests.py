"""What a user asks of a layout binds every planner."""

import re
from dataclasses import replace
from itertools import product

import pytest

from entrain_bench.balancing.planning import recompute_choices
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.config.tree import choices
from entrain_bench.program.layout import Layout
from entrain_bench.records.records import new_record
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare, run_experiment
from entrain_bench.specs.job import Job, LayoutRequest
from support.builders import tiny_job, tiny_model
from support.wide import each, each_strategy, own_dp

SMALL = ("workload=synthetic", "model=tiny", "cluster=tiny", "global_batch=16", "layout.tp=1", "layout.dp=2")


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


def test_a_module_that_the_model_does_not_have_is_named() -> None:
    with pytest.raises(UserError, match=r"^layout\.recompute=vison: unknown \(did you mean vision\?\)"):
        planned("layout.recompute=[vison]")


# One has no estimates, so nothing to try.
TRYING = [name for name in choices("strategy") if name != "megatron_rigid"]
# Whose microbatches are as many as their samples need; of these, the size decides what they hold.
OWN_NUMBER = ("hybrid_cp", "omnibal", "token_budget")
# Whose microbatches have nothing to do with it.
OWN_SIZE = ("braid", "dflop", "dynapipe", "flexsp")
# Which tries as many for every schedule, or by the common tuner.
SEVERAL_SETS = ("braid", "megatron_schedules")


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


@pytest.mark.wide
@pytest.mark.parametrize("strategy", each(name for name in TRYING if name not in SEVERAL_SETS))
def test_trials_take_the_candidate_that_is_fastest_on_trial(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[float] = []

    def trial_s(*_: object) -> float:
        tried.append(float(-len(tried)))
        return tried[-1]

    monkeypatch.setattr(Profile, "trial_s", trial_s)
    overrides = (f"strategy={strategy}", "strategy.planner.num_trials={}", "layout.dp=null")
    layouts = {}
    for num_trials in (1, 3):
        tried.clear()
        layouts[num_trials] = planned(*(text.format(num_trials) for text in overrides))
        assert len(tried) == (0 if num_trials == 1 else num_trials)
    # Every trial is faster than the one before.
    assert layouts[1].describe() != layouts[3].describe()


def test_microbatch_sizes_are_powers_of_two_that_divide_what_a_replica_gets() -> None:
    free = replace(tiny_job(tiny_model(), global_batch=48), free_microbatch_size=True)

    def sizes(job: Job) -> list[int]:
        return [each.microbatch_size for each in job.each_microbatch_size()]

    assert sizes(free) == [1, 2, 4, 8, 16]
    assert sizes(replace(free, request=LayoutRequest(dp=4))) == [1, 2, 4]
    assert sizes(replace(free, request=LayoutRequest(dp=3))) == [1, 2, 4, 8, 16]
    # No replica gets whole samples: planners say so.
    assert sizes(replace(free, request=LayoutRequest(dp=5))) == [free.microbatch_size]
    assert sizes(replace(free, free_microbatch_size=False)) == [2]


def test_a_run_records_the_number_of_microbatches_that_its_planner_chose() -> None:
    (cell,) = compose_cells([*SMALL, "strategy=megatron", "microbatch_size=null", "iterations=1"])
    record = new_record(cell, "ok", outcome=run_experiment(cell.config))
    assert record.row()["microbatch_size"] is None
    assert re.search(r"microbatches (1|2|4|8)\b", record.row()["layout"])
