"""The rigid baseline: plans by hand, rules of thumb for what is left open, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from entrain_bench.balancing.interface import Strategy
from entrain_bench.balancing.interleaved import Interleaved
from entrain_bench.balancing.planning import spread_blocks
from entrain_bench.base.errors import OutOfMemoryError, UserError
from entrain_bench.program.layout import Layout
from entrain_bench.specs.job import LayoutRequest
from entrain_bench.specs.model import ModelSpec
from entrain_bench_strategies.megatron import ArrivalOrder
from entrain_bench_strategies.megatron_rigid import RigidPlanner
from support.builders import GIB, plan_with, profile_of, samples, tiny_cluster, tiny_job, tiny_model

# Embedding and head beside the blocks: 3 + 2 and 6 + 2 layers.
MODEL = tiny_model(encoder=3, llm=6)
ROWS = [(300, [1000, 200])] * 4


def planned(model: ModelSpec = MODEL, budget_bytes: float = 16 * GIB, request: Any = None, **options: Any) -> Layout:
    job = tiny_job(model, tiny_cluster(1, 8), request=LayoutRequest(**(request or {})), budget_bytes=budget_bytes)
    return plan_with(RigidPlanner(**options), profile_of(job, samples(*ROWS)))


def splits(layout: Layout) -> list[tuple[int, ...]]:
    return [module.layers_per_stage for module in layout.modules]


def test_blocks_are_spread_evenly_and_the_first_stages_take_what_is_left() -> None:
    assert spread_blocks(8, 3) == (3, 2, 3)
    assert spread_blocks(9, 3) == (4, 2, 3)
    assert spread_blocks(10, 3) == (4, 3, 3)
    assert spread_blocks(8, 7) is None
    assert spread_blocks(8, 1) == (8,)


def test_the_encoder_has_the_first_stage_to_itself() -> None:
    layout = planned(request={"tp": 1, "dp": 2})
    # Four stages: one of the encoder, three of two blocks each.
    assert splits(layout) == [(5,), (3, 2, 3)]
    assert layout.modules[0].ranks.tolist() == [[[0]], [[4]]]
    assert layout.modules[1].ranks.tolist() == [[[1], [2], [3]], [[5], [6], [7]]]


def test_the_encoder_is_on_the_first_llm_stage_or_on_as_many_as_are_asked_for() -> None:
    first = planned(request={"tp": 1, "dp": 2}, placement="first_stage")
    assert splits(first) == [(5,), (3, 2, 1, 2)]
    assert first.modules[0].ranks.tolist() == [[[0]], [[4]]]
    two = planned(request={"tp": 1, "dp": 2}, outer_stages=2)
    assert splits(two) == [(3, 2), (4, 4)]


def test_open_degrees_follow_rules_of_thumb() -> None:
    # Four heads: TP 4 at most. On the first LLM stage the encoder needs no second one, of its own it does.
    first, own = planned(placement="first_stage"), planned()
    assert [(each.tp, each.cp, each.pp, each.dp) for each in first.modules] == [(4, 1, 1, 2)] * 2
    assert [(each.tp, each.cp, each.pp, each.dp) for each in own.modules] == [(4, 1, 1, 1)] * 2


@pytest.mark.wide
def test_as_memory_shrinks_what_is_tried_last_is_recomputation_with_most_stages() -> None:
    # Two stages without recomputation need no less here: the first keeps the activations of two microbatches.
    found: list[tuple[int, bool]] = []
    for step in range(200):
        try:
            llm = planned(budget_bytes=3e9 * 0.96**step, request={"tp": 1}, placement="first_stage").modules[1]
        except OutOfMemoryError:
            break
        if found[-1:] != [(llm.pp, llm.recompute)]:
            found.append((llm.pp, llm.recompute))
    assert found == [(1, False), (1, True), (2, True)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outer_stages": 5, "request": {"tp": 1, "dp": 2}}, r"cannot be spread evenly over 4 stages \(tp=1 cp=1\)"),
    ],
)
def test_bad_settings_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        planned(**options)


def interleaved(model: ModelSpec = MODEL, **options: Any) -> Layout:
    job = tiny_job(model, tiny_cluster(1, 8), request=LayoutRequest(tp=1, dp=4))
    planner = RigidPlanner("interleaved", **options)
    return Strategy("rigid", planner, ArrivalOrder(), Interleaved()).plan(profile_of(job, samples(*ROWS)))


def test_chunks_of_equal_parameters_go_round_the_ranks() -> None:
    # Two ranks, two chunks each: four chunks of a quarter of the parameters, as nearly as layers allow. The LLM's ends
    # have 128,000 each, its blocks 147,712; the encoder's five layers together less than one of them.
    layout = interleaved()
    vision, llm = layout.modules
    parameters = [sum(layer.parameters for layer in module.layers) for module in MODEL.modules]
    assert 0 < parameters[0] < 147_712
    assert [layer.parameters for layer in MODEL.llm.layers][:2] == [128_000, 147_712]
    # 128,000 + 147,712 with the encoder on top; then two blocks each twice, and the last block with the head.
    assert splits(layout) == [(5,), (2, 2, 2, 2)]
    assert vision.ranks[0].tolist() == [[0]]
    assert llm.ranks[0].tolist() == [[0], [1], [0], [1]]


def test_a_large_encoder_has_chunks_of_its_own() -> None:
    layout = interleaved(tiny_model(encoder=40, llm=2))
    vision, llm = layout.modules
    assert sum(vision.layers_per_stage) == 42
    assert sum(llm.layers_per_stage) == 4
    assert vision.pp > 1
    shared = vision.ranks[0, -1].tolist() == llm.ranks[0, 0].tolist()
    assert vision.pp + llm.pp == 4 + shared
