"""Costs of gradient synchronisation, optimizer and weight gathering, worked by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.costs.buckets import gather_lead_s, gather_stall_s, sync_lag_s
from entrain_bench.costs.steps import first_of_stages, last_of_stages
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program import Pass, Program
from entrain_bench.program.assignment import same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.model import ModelSpec
from support.builders import as_ints, chain_layout, find, placed, samples, tiny_cluster, tiny_model, uniform_batch

# 1e9 bytes/s of memory; pairs at 1e9 bytes/s and 1e-6 s, nodes at 5e8 and 2e-6, the network at 1e8 and 1e-5.
CLUSTER = tiny_cluster(num_nodes=2, gpus_per_node=8)
MODEL = tiny_model()
VISION, LLM = MODEL.modules
# An embedding and a head of 60 million parameters each, which fill three buckets with the blocks between them.
WIDE = tiny_model(encoder=0, llm=1, vocab_size=60_000_000 // 128)


def truth_of(model: ModelSpec = MODEL, **settings: object) -> CostTruth:
    return CostTruth(model, CLUSTER, FrameworkOptions(**settings))  # type: ignore[arg-type]


def test_steps_with_the_distributed_optimizer_by_hand() -> None:
    # DP 2 over ranks 0 and 4 (one node) of a model on one stage of TP 2 and CP 2: parameters / TP are sharded over 4.
    place, costs = placed(LLM, [[[0, 1, 2, 3]], [[4, 5, 6, 7]]], tp=2, cp=2), truth_of().step_costs
    held = LLM.parameters / 2
    # Two collectives over 4 ranks of the node tier: fp32 gradients are scattered, bf16 weights gathered.
    scatter, gather = (3 * 2e-6 + size * held * 3 / 4 / 5e8 for size in (4, 2))
    assert costs.sync_s(LLM, place) == pytest.approx([scatter], rel=1e-12)
    assert costs.gather_s(LLM, place) == pytest.approx([gather], rel=1e-12)
    assert costs.optimizer_s(LLM, place) == pytest.approx([held / 4 * 30 / 1e9], rel=1e-12)


def test_steps_without_the_distributed_optimizer_by_hand() -> None:
    place, costs = placed(LLM, [[[0, 1]], [[8, 9]]], tp=2), truth_of(distributed_optimizer=False).step_costs
    held = LLM.parameters / 2
    assert costs.sync_s(LLM, place) == pytest.approx([2 * (1e-5 + 4 * held / 2 / 1e8)], rel=1e-12)
    assert costs.gather_s(LLM, place).tolist() == [0.0]
    assert costs.optimizer_s(LLM, place) == pytest.approx([held * 30 / 1e9], rel=1e-12)


def test_every_bucket_pays_its_latency() -> None:
    place, held = placed(WIDE.llm, [[[0]], [[8]]]), float(WIDE.llm.parameters)
    assert 120e6 < held < 160e6
    for overlapped, buckets in ((True, 4), (False, 1)):
        costs = truth_of(WIDE, overlap_grad_reduce=overlapped).step_costs
        assert costs.sync_s(WIDE.llm, place) == pytest.approx([buckets * 1e-5 + 4 * held / 2 / 1e8], rel=1e-12)
        assert costs.gather_s(WIDE.llm, place) == pytest.approx([buckets * 1e-5 + 2 * held / 2 / 1e8], rel=1e-12)


@pytest.mark.parametrize("distributed", [False, True])
def test_a_single_replica_synchronises_and_gathers_nothing(distributed: bool) -> None:
    place, costs = placed(LLM, [[[0], [1]]]), truth_of(distributed_optimizer=distributed).step_costs
    exposed = costs.exposed(LLM, place)
    for seconds in (costs.sync_s(LLM, place), costs.gather_s(LLM, place), exposed.sync_s, exposed.gather_s):
        assert seconds.tolist() == [0.0, 0.0]


def test_a_tied_embedding_on_two_stages_is_reduced_between_them() -> None:
    model = tiny_model(tied_embeddings=True)
    costs = truth_of(model).step_costs
    place = placed(model.llm, [[[0], [1], [8]]])
    tied = 2 * (1e-5 + 4 * 1000 * 128 / 2 / 1e8)
    assert costs.tied_s(model.llm, place) == pytest.approx(tied, rel=1e-12)
    assert costs.exposed(model.llm, place).sync_s == pytest.approx([tied, 0.0, tied], rel=1e-12)
    assert costs.tied_s(model.llm, placed(model.llm, [[[0]]])) == 0.0
    wide = placed(model.llm, [[[0, 1], [2, 3]]], tp=2)
    assert costs.tied_s(model.llm, wide) == pytest.approx(2 * (2e-6 + 4 * 1000 * 64 / 2 / 5e8), rel=1e-12)


def test_only_the_bucket_with_the_first_layers_is_exposed() -> None:
    place, held = placed(WIDE.llm, [[[0]], [[8]]]), float(WIDE.llm.parameters)
    rest = held - 3 * 40e6
    exposed = truth_of(WIDE).step_costs.exposed(WIDE.llm, place)
    assert exposed.sync_s == pytest.approx([1e-5 + 4 * rest / 2 / 1e8], rel=1e-9)
    assert exposed.gather_s == pytest.approx([1e-5 + 2 * rest / 2 / 1e8], rel=1e-9)
    costs = truth_of(WIDE, overlap_grad_reduce=False, overlap_param_gather=False).step_costs
    exposed = costs.exposed(WIDE.llm, place)
    assert exposed.sync_s.tolist() == costs.sync_s(WIDE.llm, place).tolist()
    assert exposed.gather_s.tolist() == costs.gather_s(WIDE.llm, place).tolist()


# Steps and gathers of a program


def two_replicas(recompute: bool = False, split: bool = False) -> Program:
    layout = chain_layout(MODEL, 1, 2, 3, dp=2, recompute=recompute)
    shapes, assignment = uniform_batch(MODEL, 3, dp=2)
    behind = stages_behind(layout)
    return chain_program(MODEL, shapes, layout, assignment, behind, weight_delay=behind if split else None)


def test_first_and_last_passes_of_every_replica() -> None:
    program = two_replicas()
    for index, module in enumerate(("vision", "llm")):
        for stage in range(program.layout.modules[index].pp):
            last, first = last_of_stages(program, index)[stage], first_of_stages(program, index)[stage]
            for replica in (0, 1):
                # Units are dealt out in turn: each replica has three microbatches of one.
                assert last[replica] == find(program, module, Pass.BACKWARD, stage, [4 + replica], replica)
                assert first[replica] == find(program, module, Pass.FORWARD, stage, [replica], replica)


def test_stages_and_replicas_without_work_have_no_first_and_no_last() -> None:
    layout = chain_layout(MODEL, 1, 1, 2, dp=2)
    shapes = samples((10, [40]), (10, []))
    replica, zero = as_ints([0, 1]), np.zeros(2, np.int64)
    program = chain_program(
        MODEL, shapes, layout, same_microbatches(MODEL, shapes, replica, zero, zero), stages_behind(layout)
    )
    assert [len(stage) for stage in last_of_stages(program, 0)] == [1]
    assert [len(stage) for stage in first_of_stages(program, 1)] == [2]
    text = samples((10, []), (10, []))
    program = chain_program(
        MODEL, text, layout, same_microbatches(MODEL, text, replica, zero, zero), stages_behind(layout)
    )
    prices = truth_of().price(program)
    assert len(last_of_stages(program, 0)[0]) == len(prices.steps.last_backwards[0]) == 0
    assert prices.steps.sync_s[0] > 0.0


@pytest.mark.parametrize("recompute", [False, True])
def test_lag_release_and_stall_follow_the_layers_of_a_stage(recompute: bool) -> None:
    program = two_replicas(recompute)
    truth, place = truth_of(), program.layout.modules[1]
    prices, eager = truth.price(program), truth_of(align_param_gather=False).price(program)
    lengths = LLM.lengths(program.shapes, as_ints([0]))
    for stage in (0, 1):
        # A stage of each layer alone tells how long it takes; the two stages hold two layers each.
        alone = replace(place, layers_per_stage=(1, 1, 1, 1), ranks=np.tile(place.ranks[:, :1], (1, 4, 1)))
        times = truth.unit_times(LLM, alone, lengths)
        layers = slice(2 * stage, 2 * stage + 2)
        forward_s, backward_s = times.forward_s[:, layers], times.backward_s[:, layers]
        parameters = np.array([float(layer.parameters) for layer in LLM.layers[layers]])
        bucket, sync = np.array([parameters.sum()]), truth.step_costs.sync_s(LLM, place)[[stage]]
        gather = truth.step_costs.gather_s(LLM, place)[[stage]]
        number = 1 + stage
        lag = sync_lag_s(backward_s, parameters, bucket, sync)[0]
        assert prices.steps.lag_s[number] == pytest.approx([lag] * 2, rel=1e-12)
        firsts = first_of_stages(program, 1)[stage]
        lead, stall = (price(forward_s, parameters, bucket, gather)[0] for price in (gather_lead_s, gather_stall_s))
        assert prices.release_s[firsts] == pytest.approx([lead] * 2, rel=1e-12)
        assert eager.stall_s[firsts] == pytest.approx([stall] * 2, rel=1e-12)
    firsts = np.concatenate([first_of_stages(program, index)[s] for index, s in ((0, 0), (1, 0), (1, 1))])
    assert np.flatnonzero(prices.release_s).tolist() == sorted(firsts.tolist())
    assert not prices.stall_s.any()
    assert not eager.release_s.any()


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_synchronised_as_weight_passes_make_them(recompute: bool) -> None:
    # Recomputed activations are there already.
    program = two_replicas(recompute, split=True)
    truth, place = truth_of(), program.layout.modules[1]
    prices, lengths = truth.price(program), LLM.lengths(program.shapes, as_ints([0]))
    for stage in (0, 1):
        lasts = last_of_stages(program, 1)[stage]
        assert lasts.tolist() == [
            find(program, "llm", Pass.WEIGHT, stage, [4 + replica], replica) for replica in (0, 1)
        ]
        assert prices.steps.last_backwards[1 + stage].tolist() == lasts.tolist()
        alone = replace(place, layers_per_stage=(1, 1, 1, 1), ranks=np.tile(place.ranks[:, :1], (1, 4, 1)))
        weight_s = truth.unit_times(LLM, alone, lengths, split=True).weight_s
        assert weight_s is not None
        layers = slice(2 * stage, 2 * stage + 2)
        parameters = np.array([float(layer.parameters) for layer in LLM.layers[layers]])
        bucket, sync = np.array([parameters.sum()]), truth.step_costs.sync_s(LLM, place)[[stage]]
        lag = sync_lag_s(weight_s[:, layers], parameters, bucket, sync)[0]
        assert prices.steps.lag_s[1 + stage] == pytest.approx([lag] * 2, rel=1e-12)


def test_gathers_of_modules_on_the_same_ranks_follow_each_other() -> None:
    layout = Layout((placed(VISION, [[[0]], [[1]]]), placed(LLM, [[[0]], [[1]]])), 1)
    shapes, zero = samples((10, [40]), (10, [40])), np.zeros(2, np.int64)
    assignment = same_microbatches(MODEL, shapes, as_ints([0, 1]), zero, zero)
    program = chain_program(MODEL, shapes, layout, assignment, [as_ints([0]), as_ints([0])])
    costs = truth_of().step_costs
    encoder_s, llm_s = (
        costs.gather_s(module, place)[0] for module, place in zip(MODEL.modules, layout.modules, strict=True)
    )
    release = truth_of().price(program).release_s
    assert release[first_of_stages(program, 0)[0]] == pytest.approx([encoder_s] * 2, rel=1e-12)
    assert release[first_of_stages(program, 1)[0]] == pytest.approx([encoder_s + llm_s] * 2, rel=1e-12)
    # A batch of text keeps the encoder idle, and its gather as long.
    text = samples((10, []), (10, []))
    assignment = same_microbatches(MODEL, text, as_ints([0, 1]), zero, zero)
    program = chain_program(MODEL, text, layout, assignment, [as_ints([0]), as_ints([0])])
    release = truth_of().price(program).release_s
    assert release[first_of_stages(program, 1)[0]] == pytest.approx([encoder_s + llm_s] * 2, rel=1e-12)


def test_without_overlap_the_gather_follows_the_optimizer() -> None:
    program = two_replicas()
    truth = truth_of(overlap_param_gather=False)
    prices = truth.price(program)
    gathers = [
        truth.step_costs.gather_s(module, place)
        for module, place in zip(MODEL.modules, program.layout.modules, strict=True)
    ]
    assert prices.steps.gather_s.tolist() == np.concatenate(gathers).tolist()
    assert not truth_of().price(program).steps.gather_s.any()
    assert not prices.release_s.any()
    assert not prices.stall_s.any()
