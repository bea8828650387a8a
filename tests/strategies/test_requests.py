"""What a user asks of a layout binds every planner."""

from itertools import product

import pytest

from entrain_bench.config.tree import choices
from entrain_bench.errors import IncompatibleError, UserError
from entrain_bench.experiment import prepare
from entrain_bench.program.layout import Layout
from entrain_bench.run import compose_cells
from entrain_bench.specs.job import LayoutRequest
from entrain_bench.strategy.planning import recompute_choices
from support.builders import tiny_job, tiny_model

SMALL = ("workload=synthetic", "model=tiny", "cluster=tiny", "global_batch=16", "layout.tp=1", "layout.dp=2")


def planned(*overrides: str) -> Layout:
    (cell,) = compose_cells([*SMALL, *overrides])
    setting = prepare(cell.config)
    return setting.strategy.plan(setting.profile)


@pytest.mark.parametrize(
    ("strategy", "asked"), [*product(choices("strategy"), ["[]", "[vision]", "[llm]", "[vision,llm]"])]
)
def test_every_planner_recomputes_what_is_asked_for_and_nothing_else(strategy: str, asked: str) -> None:
    layout = planned(f"strategy={strategy}", f"layout.recompute={asked}")
    assert {placed.module for placed in layout.modules if placed.recompute} == {*filter(None, asked[1:-1].split(","))}


def test_modules_that_share_their_ranks_recompute_together_or_not_at_all() -> None:
    model = tiny_model(audio=2)
    groups = model.module_groups
    names = [module.name for module in model.modules]

    def asked_for(*recompute: str) -> list[tuple[bool, ...]]:
        return recompute_choices(tiny_job(model, request=LayoutRequest(recompute=recompute)), groups)

    assert asked_for(*names[:2]) == [(True, False)]
    assert recompute_choices(tiny_job(model), groups) == [*product([False, True], repeat=2)]
    with pytest.raises(IncompatibleError, match=r"layout\.recompute=.* modules on the same ranks alike"):
        asked_for(names[0])


def test_a_module_that_the_model_does_not_have_is_named() -> None:
    with pytest.raises(UserError, match=r"^layout\.recompute=vison: unknown \(did you mean vision\?\)"):
        planned("layout.recompute=[vison]")
