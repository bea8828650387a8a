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
    collective_passes,
    exposed_s,
    gathered_bytes,
    gathering,
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
    assert layer_parameters(model.llm, 1).tolist() == [EMBEDDING, BLOCK, BLOCK, HEAD - EMBEDDING]
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


# Four ranks, two a node; the LLM has two blocks beside embedding and head.
NODES = tiny_cluster(num_nodes=2, gpus_per_node=2)
# Bytes a rank holds all the time (bf16 weights, fp32 gradients, fp32 weights and moments), and besides in a pass.
HELD = {
    "zero1": 2 + 4 + 12 / 4,
    "zero2": 2 + (4 + 12) / 4,
    "zero3": 16 / 4,
    "zero3_kept": 2 + 16 / 4,
    "hybrid": 16 / 2,
}
# Whether a forward of the first microbatch, a later one, and a backward gather weights; whether a backward scatters.
MOVES = {
    "zero1": (0, 0, 0, 0),
    "zero2": (0, 0, 0, 1),
    "zero3": (1, 1, 1, 1),
    "zero3_kept": (1, 0, 0, 1),
    "hybrid": (1, 1, 1, 1),
}
NAMES = list(HELD)


def kinds(kind: str) -> Program:
    nodes = 2 if kind == "hybrid" else 1
    modules = [
        replace(placed(module, np.arange(4).reshape(4, 1, 1)), sharding=kind, nodes=nodes) for module in MODEL.modules
    ]
    layout = Layout(tuple(modules), 2)
    check_layout(layout, MODEL, NODES)
    shapes, assignment = uniform_batch(MODEL, 2, dp=4)
    return chain_program(MODEL, shapes, layout, assignment, stages_behind(layout))


@pytest.mark.parametrize("kind", NAMES)
def test_bytes_of_every_kind_by_hand(kind: str) -> None:
    place = kinds(kind).layout.modules[-1]
    assert Memory(MODEL).stage_state_bytes(LLM, place) == pytest.approx([LLM.parameters * HELD[kind]], rel=1e-12)
    gathered = 0 if kind in ("zero1", "zero2", "zero3_kept") else 2 * 2 * BLOCK
    assert gathered_bytes(LLM, place, 2) == (gathered, gathered + 4 * BLOCK)


@pytest.mark.parametrize("kind", NAMES)
def test_traffic_of_every_kind_by_hand(kind: str) -> None:
    program = kinds(kind)
    index = program.model.llm_index
    traffic = layer_traffic(LLM, program.layout.modules[index], NODES)
    held = np.array([EMBEDDING, BLOCK, BLOCK, HEAD])
    inside, across = (NODES.ring_tiers(np.array([ranks]))[0] for ranks in ([0, 1], [0, 2]))
    whole = NODES.ring_tiers(np.arange(4)[None])[0]
    assert inside.bandwidth_bytes_per_s > across.bandwidth_bytes_per_s

    def ring_s(num_bytes: Any, ranks: int, tier: Any) -> Any:
        return (ranks - 1) * (tier.latency_s + num_bytes / ranks / tier.bandwidth_bytes_per_s)

    ranks, tier = (2, inside) if kind == "hybrid" else (4, whole)
    first, later, back, scatters = MOVES[kind]
    gather_s, scatter_s = ring_s(2 * held, ranks, tier), ring_s(4 * held, ranks, tier)
    if kind == "hybrid":
        scatter_s = scatter_s + 2 * ring_s(4 * held / 2, 2, across)
    assert traffic.gather_s == pytest.approx(first * gather_s, rel=1e-12)
    assert traffic.again_s == pytest.approx(back * gather_s, rel=1e-12)
    assert traffic.scatter_s == pytest.approx(scatters * scatter_s, rel=1e-12)
    # A second microbatch gathers unless weights stay; passes with collectives start on all ranks together.
    assert gathering(program, index).tolist() == [bool(later if m else first) for m in program.chunks[index].microbatch]
    group = collective_passes(program)
    starts = group[program.forward_actions(index)[:, 0]] >= 0
    assert starts.tolist() == gathering(program, index).tolist()
    assert np.all((group[program.backward_actions(index)] >= 0) == bool(scatters))
    assert {*group[group >= 0].tolist()} == {*range(group.max() + 1)}
    # What is left for the step: ZeRO-1 and ZeRO-2 gather, ZeRO-1 sums gradients.
    costs = CostTruth(MODEL, NODES, FrameworkOptions()).step_costs
    place = program.layout.modules[index]
    total = float(held.sum())
    gathers, sums = kind in ("zero1", "zero2"), kind == "zero1"
    assert costs.gather_s(LLM, place) == pytest.approx([gathers * ring_s(2 * total, 4, whole)], rel=1e-12)
    assert costs.sync_s(LLM, place) == pytest.approx([sums * ring_s(4 * total, 4, whole)], rel=1e-12)


@pytest.mark.parametrize("kind", NAMES[1:])
def test_passes_of_a_rank_move_as_much_as_their_kind_says(kind: str) -> None:
    program = kinds(kind)
    # Nothing is hidden, so that all that passes gather and scatter adds to them.
    framework = FrameworkOptions(overlap_param_gather=False, overlap_grad_reduce=False)
    layers_s = {index: (np.ones((8, len(module.layers))),) * 2 for index, module in enumerate(MODEL.modules)}
    added_s = exposed_s(program, layers_s, NODES, framework)[program.lane_actions[: program.lane_offsets[1]]].sum()
    first, later, back, _ = MOVES[kind]
    wanted_s = 0.0
    for module, place in zip(MODEL.modules, program.layout.modules, strict=True):
        traffic = layer_traffic(module, place, NODES)
        wanted_s += (first + later) * traffic.gather_s.sum() + 2 * back * traffic.again_s.sum()
        wanted_s += 2 * traffic.scatter_s.sum()
    assert added_s == pytest.approx(wanted_s, rel=1e-9)
