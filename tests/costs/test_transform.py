"""Costs of turning one grid's boundary tensor into the other's on the same ranks, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from entrain_bench.balancing.schedules import chain_program
from entrain_bench.base.arrays import FloatArray, rows_of
from entrain_bench.costs.edges import colocated_transforms
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program import Pass, Program
from entrain_bench.program.assignment import same_microbatches
from entrain_bench.program.layout import Layout, are_grids
from entrain_bench.specs.job import Degrees
from entrain_bench.specs.model import ModelSpec
from entrain_bench_strategies.hetero import BatchSlices, ColocatedScheduler
from support.builders import TOKENS, encoder_config, llm_config, placed, samples, tiny_cluster
from support.hetero import MODEL, pair_layout, profile_for

# tiny_cluster: pairs 1e9 bytes/s, 1 us; a node of 8 at 5e8 bytes/s, 2 us. An item of 40 tokens hands 10 to an LLM of
# hidden size 128 in bf16: 2560 bytes.
CLUSTER = tiny_cluster(1, 8)
ITEM_BYTES = 10 * 128 * 2


def program_of(layout: Layout, count: int, microbatch_size: int = 1) -> Program:
    profile, shapes = profile_for(microbatch_size), samples(*[(10, [40])] * count)
    assignment = BatchSlices().assign(shapes, layout, profile)
    return ColocatedScheduler().schedule(shapes, layout, assignment, profile)


def delays(program: Program, kind: Pass) -> FloatArray:
    """Delays between the modules that inputs of that pass wait for."""
    source, target = program.dep_actions, rows_of(program.dep_offsets)
    crossing = (program.module[source] != program.module[target]) & (program.kind[target] == kind)
    return CostTruth(MODEL, CLUSTER).price(program).delay_s[crossing]


def test_fan_in_gathers_the_whole_microbatch_over_k_ranks_and_slices_back() -> None:
    # Encoder TP2 DP4 -> LLM TP4 DP2: groups {0, 2}, {1, 3} of two ranks, inside the node but not inside a pair. Each
    # holds one of the microbatch's two items; a ring all-gather of both over 2 ranks moves half of them in one step.
    layout = pair_layout(Degrees(2, 1, 1, 4), Degrees(4, 1, 1, 2), colocated=True)
    program = program_of(layout, 8, microbatch_size=2)
    expected = 2e-6 + 2 * ITEM_BYTES / 2 / 5e8
    assert delays(program, Pass.FORWARD) == pytest.approx([expected] * 8, rel=1e-12)
    assert delays(program, Pass.BACKWARD).tolist() == [0.0] * 8


def test_three_phases_gather_the_window_once_and_broadcast_gradients_to_later_stages() -> None:
    # Encoder TP1 DP8 -> LLM TP2 PP2 DP2: k = 4 encoder replicas with 2 of the 8 items of an LLM replica's window each.
    layout = pair_layout(Degrees(1, 1, 1, 8), Degrees(2, 1, 2, 2), colocated=True)
    program = program_of(layout, 16)
    window = 8 * ITEM_BYTES
    assert delays(program, Pass.FORWARD) == pytest.approx([3 * 2e-6 + window * 3 / 4 / 5e8] * 16, rel=1e-12)
    # Gradients are on the first stage; a broadcast over the 2 stages, then slices.
    assert delays(program, Pass.BACKWARD) == pytest.approx([2e-6 + window / 5e8] * 16, rel=1e-12)


def test_disjoint_modules_transfer_instead() -> None:
    apart = pair_layout(Degrees(1, 1, 1, 4), Degrees(2, 1, 1, 2), colocated=False)
    assert not are_grids(*apart.modules)
    # Groups that do not lie on the same ranks form no grids either: the LLM's replicas are swapped.
    together = pair_layout(Degrees(2, 1, 1, 4), Degrees(4, 1, 1, 2), colocated=True)
    vision, llm = together.modules
    assert are_grids(vision, llm)
    swapped = type(llm)(llm.module, llm.tp, llm.cp, llm.layers_per_stage, llm.ranks[::-1].copy())
    assert not are_grids(vision, swapped)


def test_a_generator_behind_the_llm_takes_no_part() -> None:
    # Two encoder replicas feed the LLM on the same two ranks; a generator is on a third, or on the same two as well.
    modules = {"vision": encoder_config(), "llm": llm_config(), "out": encoder_config(role="generator", item_tokens=8)}
    model = ModelSpec.from_config({"name": "handmade", "modules": modules, "tokens": TOKENS})
    vision, llm, out = model.modules
    shapes, zero = samples((10, [40]), (10, [40])), np.zeros(2, np.int64)
    for ranks in ([[[2]]], [[[0]], [[1]]]):
        layout = Layout((placed(vision, [[[0]], [[1]]]), placed(llm, [[[0, 1]]], tp=2), placed(out, ranks)), 1)
        assignment = same_microbatches(model, shapes, zero, zero, zero, encoder_replica=np.arange(2))
        program = chain_program(model, shapes, layout, assignment, [np.zeros(1, np.int64)] * 3)
        found, seconds = colocated_transforms(program, CLUSTER)
        target = program.module[rows_of(program.dep_offsets)[found]]
        source = program.module[program.dep_actions[found]]
        assert sorted(zip(source.tolist(), target.tolist(), strict=True)) == [(0, 1), (0, 1), (1, 0), (1, 0)]
        # An all-gather of both items' halves over the pair, and a slice back.
        assert sorted(seconds) == pytest.approx([0.0, 0.0, *[1e-6 + 2 * ITEM_BYTES / 2 / 1e9] * 2], rel=1e-12)
