"""Sharded weights: collectives, exposed time and memory, worked by hand and against a plain walk through the layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.costs.memory import Memory
from entrain_bench.costs.sharding import (
    gathered_bytes,
    layer_parameters,
    layer_traffic,
)
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program import Pass, Program
from entrain_bench.program.layout import Layout, ModuleLayout, check_layout, layout_from_json, layout_to_json
from entrain_bench.simulate import Simulator
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from support.builders import placed, tiny_cluster, tiny_model, uniform_batch

# 1e9 bytes/s of memory; pairs at 1e9 bytes/s and 1e-6 s, nodes at 5e8 and 2e-6, the network at 1e8 and 1e-5.
CLUSTER = tiny_cluster(num_nodes=2, gpus_per_node=8)
MODEL = tiny_model()
VISION, LLM = MODEL.modules
BLOCK = 128 * 256 + 128 * 128 + 128 * 512 + 256 * 128 + 2 * 128
EMBEDDING, HEAD = 1000 * 128, 1000 * 128 + 128


def sharded(module: ModuleSpec, dp: int, tp: int = 1, **changes: Any) -> ModuleLayout:
    place = placed(module, np.arange(dp * tp).reshape(dp, 1, tp), tp=tp)
    return replace(place, sharding="zero3", **changes)


def layout_of(model: ModelSpec, dp: int, **changes: Any) -> Layout:
    return Layout(tuple(sharded(module, dp, **changes) for module in model.modules), 2)


def two_microbatches(dp: int = 2, model: ModelSpec = MODEL, **changes: Any) -> Program:
    layout = layout_of(model, dp, **changes)
    shapes, assignment = uniform_batch(model, 2, dp=dp)
    return chain_program(model, shapes, layout, assignment, stages_behind(layout))


def test_collectives_of_a_layer_by_hand() -> None:
    # TP 2, DP 2 over ranks 0 to 3: every second rank shares weights, which crosses pairs inside a node.
    traffic = layer_traffic(LLM, sharded(LLM, 2, tp=2), CLUSTER)
    held = np.array([EMBEDDING, BLOCK, BLOCK, HEAD]) / 2
    assert traffic.gather_s == pytest.approx(2e-6 + 2 * held / 2 / 5e8, rel=1e-12)
    assert traffic.again_s.tolist() == traffic.gather_s.tolist()
    assert traffic.scatter_s == pytest.approx(2e-6 + 4 * held / 2 / 5e8, rel=1e-12)


def test_a_tied_embedding_is_gathered_once_and_stays() -> None:
    model = tiny_model(tied_embeddings=True)
    assert layer_parameters(model.llm).tolist() == [EMBEDDING, BLOCK, BLOCK, HEAD - EMBEDDING]
    forward, backward = gathered_bytes(model.llm, sharded(model.llm, 2), 2)
    assert forward == 2 * (EMBEDDING + 2 * BLOCK)
    assert backward == forward + 4 * max(EMBEDDING, BLOCK)


def test_states_and_gathered_layers_by_hand() -> None:
    memory, place = Memory(MODEL), sharded(LLM, 2, tp=2)
    # fp32 weight, gradient and two moments, over TP 2 and DP 2.
    assert memory.stage_state_bytes(LLM, place) == pytest.approx([LLM.parameters * 16 / 4], rel=1e-12)
    # A frozen parameter is a bf16 weight alone, over DP 2.
    frozen = replace(VISION, layers=tuple(layer.frozen(True) for layer in VISION.layers))
    assert memory.stage_state_bytes(frozen, sharded(frozen, 2)) == pytest.approx([VISION.parameters * 2 / 2])
    # Two blocks are the heaviest neighbours: EMBEDDING, BLOCK, BLOCK, HEAD.
    assert max(EMBEDDING, HEAD) < BLOCK
    whole = 2 * (2 * BLOCK) / 2
    assert gathered_bytes(LLM, place, 2) == (whole, whole + 4 * BLOCK / 2)
    program, plain = two_microbatches(), Memory(MODEL)
    held = replace(program, layout=Layout(tuple(replace(m, sharding="zero1") for m in program.layout.modules), 2))
    during, without = (plain.over_program(one)[0] - plain.lane_state_bytes(one.layout).max() for one in (program, held))
    extra = {"vision": gathered_bytes(VISION, sharded(VISION, 2), 2), "llm": gathered_bytes(LLM, sharded(LLM, 2), 2)}
    for entry, action in enumerate(program.lane_actions.tolist()):
        view = program.view(action)
        more = extra[view.module][view.kind] if view.kind <= Pass.BACKWARD else 0.0
        assert during[entry] - without[entry] == pytest.approx(more, rel=1e-9), str(view)


def test_backwards_are_whole() -> None:
    layout = layout_of(MODEL, 2)
    shapes, assignment = uniform_batch(MODEL, 2, dp=2)
    behind = stages_behind(layout)
    program = chain_program(MODEL, shapes, layout, assignment, behind, weight_delay=behind)
    with pytest.raises(IncompatibleError, match="scheduler: cannot split the backward of vision"):
        Simulator(CostTruth(MODEL, CLUSTER, FrameworkOptions()), 1e12).execute(program)


def test_layouts_survive_text_and_are_checked() -> None:
    layout = layout_of(MODEL, 2)
    again = layout_from_json(layout_to_json(layout))
    assert [module.sharded for module in again.modules] == [True, True]
    assert layout_to_json(again) == layout_to_json(layout)
    stages = replace(placed(LLM, [[[0], [1]]]), sharding="zero3")
    for wrong, field in ((stages, "pp"), (sharded(LLM, 2, offload=True), "offload")):
        with pytest.raises(UserError, match=f"layout.llm.{field}=.* with sharded weights"):
            check_layout(Layout((sharded(VISION, 2), wrong), 2), MODEL, CLUSTER)
