"""What the framework does otherwise with encoders: whole sequences, whole hidden states, several optimizers."""

from __future__ import annotations

import numpy as np
import pytest

from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.costs.edges import derive_edges
from entrain_bench.costs.memory import Memory
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program.assignment import same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.specs.framework import FrameworkOptions
from support.builders import placed, samples, tiny_cluster, tiny_model

# Pairs at 1e9 bytes/s and 1e-6 s, nodes at 5e8 and 2e-6, the network at 1e8 and 1e-5.
CLUSTER = tiny_cluster(num_nodes=2, gpus_per_node=8)
MODEL = tiny_model()
VISION, LLM = MODEL.modules
WHOLE_SEQUENCES = FrameworkOptions(encoder_cp=False)
WHOLE_STATES = FrameworkOptions(encoder_sp=False)


def test_it_keeps_their_activations_and_a_share_of_the_states() -> None:
    split, whole = Memory(MODEL), Memory(MODEL, WHOLE_SEQUENCES)
    place = placed(VISION, [[[0, 1, 2, 3]]], cp=4)
    for less, more in zip(split.token_bytes(VISION, place), whole.token_bytes(VISION, place), strict=True):
        assert more == pytest.approx(4 * less, rel=1e-12)
    # Ranks of a context-parallel group hold the same weights in both: 2 + 4 bytes, and 12 shared out among four.
    assert whole.stage_state_bytes(VISION, place) == pytest.approx([VISION.parameters * (6 + 12 / 4)], rel=1e-12)
    assert whole.token_bytes(LLM, place) == split.token_bytes(LLM, placed(LLM, [[[0, 1, 2, 3]]], cp=4))


@pytest.mark.parametrize(
    ("framework", "parts"),
    [
        (FrameworkOptions(), 4),
        (WHOLE_SEQUENCES, 2),
        (WHOLE_STATES, 2),
        (FrameworkOptions(encoder_cp=False, encoder_sp=False), 1),
    ],
    ids=["split", "whole sequences", "whole states", "both"],
)
def test_a_stage_of_an_encoder_sends_what_each_of_its_ranks_has(framework: FrameworkOptions, parts: int) -> None:
    layout = Layout(
        (placed(VISION, [[[0, 1, 2, 3], [4, 5, 6, 7]]], tp=2, cp=2), placed(LLM, [[[8, 9, 10, 11]]], tp=2, cp=2)), 1
    )
    shapes, zero = samples((10, [400])), np.zeros(1, np.int64)
    assignment = same_microbatches(MODEL, shapes, zero, zero, zero)
    program = chain_program(MODEL, shapes, layout, assignment, stages_behind(layout))
    edges = derive_edges(program, CLUSTER, framework)
    inside = edges.travels & (edges.source < 2) & (edges.target < 2)
    # 400 tokens of 64 bf16 values each way, inside a node; 100 LLM tokens of 128 to the other, all pairs of ranks.
    assert edges.link_s[inside] == pytest.approx([400 * 64 * 2 / parts / 5e8] * 2, rel=1e-12)
    assert edges.link_s[edges.travels & ~inside] == pytest.approx([100 * 128 * 2 / 4 / 1e8] * 2, rel=1e-12)


def test_two_instances_of_the_optimizer_by_hand() -> None:
    # DP 4 on ranks 0, 1, 8 and 9: an instance a node, a pair each; each shard is reduced over both.
    place = placed(VISION, [[[0]], [[1]], [[8]], [[9]]])
    framework = FrameworkOptions(encoder_optimizers=2)
    costs, held = CostTruth(MODEL, CLUSTER, framework).step_costs, VISION.parameters
    scatter, gather = (1e-6 + size * held / 2 / 1e9 for size in (4, 2))
    over_both = 2 * (1e-5 + 4 * held / 2 / 2 / 1e8)
    assert costs.sync_s(VISION, place) == pytest.approx([scatter + over_both], rel=1e-12)
    assert costs.gather_s(VISION, place) == pytest.approx([gather], rel=1e-12)
    assert costs.optimizer_s(VISION, place) == pytest.approx([held / 2 * 30 / 1e9], rel=1e-12)
    state = Memory(MODEL, framework).stage_state_bytes(VISION, place)
    assert state == pytest.approx([held * (6 + 12 / 2)], rel=1e-12)
    # The LLM has one instance: a ring of two links between the nodes.
    llm = costs.sync_s(LLM, placed(LLM, [[[0]], [[1]], [[8]], [[9]]]))
    assert llm == pytest.approx([3 * (1e-5 + 4 * LLM.parameters / 4 / 2e8)], rel=1e-12)
