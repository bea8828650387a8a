"""What a user asks of a layout binds every planner."""

from itertools import product

import pytest

from entrain_bench.balancing.planning import recompute_choices
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.config.tree import choices
from entrain_bench.program.layout import Layout
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare
from entrain_bench.specs.job import LayoutRequest
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
