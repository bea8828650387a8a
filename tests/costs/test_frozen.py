"""Frozen modules: what has no gradients takes no time, no memory and no synchronisation for them."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.base.errors import UserError
from entrain_bench.costs.bound import lower_bound_s
from entrain_bench.costs.memory import Memory
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program.layout import Layout
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import RunContext, prepare
from entrain_bench.specs.framework import FrameworkOptions, with_options
from entrain_bench.specs.layer import BF16_BYTES
from entrain_bench.specs.model import TRAINING_FLOPS
from support.builders import chain_layout, samples, tiny_cluster, tiny_model, uniform_batch
from support.wide import each_strategy, own_dp

SMALL = ("workload=synthetic", "model=tiny", "cluster=tiny", "global_batch=16", "layout.tp=1", "layout.dp=2")
MODEL = tiny_model(encoder=4, llm=4)
VISION, LLM = (MODEL.with_frozen([name]) for name in ("vision", "llm"))
CLUSTER = tiny_cluster(launch_s=0.0)


def test_an_encoder_keeps_learning_in_its_projector_alone() -> None:
    vision = VISION.module("vision")
    assert [layer.learns for layer in vision.layers] == [False] * 5 + [True]
    assert [layer.backward_share for layer in vision.layers] == [0.0] * 5 + [1.0]
    assert vision.layers[-1] == MODEL.module("vision").layers[-1]
    assert vision.learning_parameters == vision.layers[-1].parameters
    assert VISION.llm == MODEL.llm
    # The projector before it learns, so the LLM hands gradients on.
    assert {(layer.learns, layer.backward_share) for layer in LLM.llm.layers} == {(False, 0.5)}
    # Nothing does before an LLM without encoders.
    alone = MODEL.with_frozen(["vision"]).llm.frozen(passes_gradients=False)
    assert not alone.has_backward


def test_projectors_may_be_all_that_learns() -> None:
    both = MODEL.with_frozen(["vision", "llm"])
    assert sum(module.learning_parameters for module in both.modules) == MODEL.module("vision").layers[-1].parameters
    # Gradients reach the projector through the LLM.
    assert {(layer.learns, layer.backward_share) for layer in both.llm.layers} == {(False, 0.5)}
    (cell,) = compose_cells([*SMALL, "strategy=megatron", "freeze=[vision,llm]"])
    assert prepare(cell.config).job.framework.freeze == ("vision", "llm")


@pytest.mark.parametrize("recompute", [False, True])
def test_stages_without_backward_take_no_time_for_it_and_recompute_nothing(recompute: bool) -> None:
    layout = chain_layout(VISION, 2, 2, 4, recompute=recompute)
    shapes, assignment = uniform_batch(VISION, 4)
    truth = CostTruth(VISION, CLUSTER)
    program = chain_program(VISION, shapes, layout, assignment, stages_behind(layout))
    prices = truth.price(program)
    backward = prices.duration_s[program.backward_actions(0)]
    assert np.all(backward[:, 0] == 0.0)
    assert np.all(backward[:, 1] > 0.0)
    change, working = truth.memory.action_bytes(program)
    assert np.all(change[program.forward_actions(0)[:, 0]] == 0.0)
    assert np.all(working[program.backward_actions(0)[:, 0]] == 0.0)


def test_frozen_stages_hold_bf16_weights_and_neither_synchronise_nor_step() -> None:
    layout = chain_layout(MODEL, 2, 2, 4, dp=2)
    for model, name, frozen in ((VISION, "vision", [True, False]), (LLM, "llm", [True, True])):
        module, placed = model.module(name), layout.module(name)
        truth, full = CostTruth(model, CLUSTER), Memory(MODEL).stage_state_bytes(MODEL.module(name), placed)
        held = truth.memory.stage_state_bytes(module, placed)
        weights = BF16_BYTES * truth.memory.stage_parameters(module, placed)
        for stage, still in enumerate(frozen):
            assert (held[stage] == weights[stage]) == still
            assert held[stage] < full[stage]
            for step_s in (truth.step_costs.sync_s, truth.step_costs.gather_s, truth.step_costs.optimizer_s):
                assert (step_s(module, placed)[stage] == 0.0) == still


def test_model_flops_count_what_gradients_need() -> None:
    shapes = samples((100, [400]), (50, [200, 100]))
    full = TRAINING_FLOPS * MODEL.forward_flops(shapes)
    assert MODEL.training_flops(shapes) == full
    vision, llm = MODEL.modules
    blocks = vision.forward_flops(shapes.item_encoder_tokens).sum()
    head = vision.layers[-1].forward_flops(shapes.item_encoder_tokens).sum()
    assert VISION.training_flops(shapes) == pytest.approx(full - 2 * (blocks - head))
    attention = sum(layer.attention.flops(shapes.llm_tokens).sum() for layer in llm.layers if layer.attention)
    products = llm.forward_flops(shapes.llm_tokens).sum() - attention
    assert LLM.training_flops(shapes) == pytest.approx(full - products)


@cache
def setting(*overrides: str) -> tuple[RunContext, Layout]:
    (cell,) = compose_cells([*SMALL, *overrides])
    made = prepare(cell.config)
    return made, made.strategy.plan(made.profile)


@pytest.mark.wide
@pytest.mark.parametrize("frozen", ["vision", "llm"])
@pytest.mark.parametrize("strategy", each_strategy())
def test_every_strategy_trains_the_rest_in_less_time_and_memory(strategy: str, frozen: str) -> None:
    seconds = {}
    for freeze in ("[]", f"[{frozen}]"):
        made, layout = setting(f"strategy={strategy}", *own_dp(strategy), f"freeze={freeze}")
        shapes = made.source.batch(0, made.job.global_batch, 0)
        program = made.strategy.program(shapes, layout, made.profile)
        timeline = made.executor.execute(program)  # type: ignore[union-attr]
        seconds[freeze] = timeline.iteration_time_s
        assert timeline.iteration_time_s >= lower_bound_s(made.truth, layout, shapes) * (1 - 1e-12)
    assert seconds[f"[{frozen}]"] < seconds["[]"]


def test_what_cannot_be_frozen_is_named() -> None:
    (cell,) = compose_cells([*SMALL, "freeze=[vison]"])
    with pytest.raises(UserError, match=r"freeze=vison: unknown"):
        prepare(cell.config)
    everything = FrameworkOptions(freeze=("vision", "vision.projector", "llm"))
    with pytest.raises(UserError, match=r"freeze=\[.*\]: must be such that a module, a projector or an adapter is"):
        with_options(MODEL, everything)
