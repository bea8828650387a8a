"""Generators: what they wait for, what they cost, where they lie, and who refuses them; the U-Net; packed samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.planning import Island, place_islands
from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.costs.bound import lower_bound_s
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program import Pass
from entrain_bench.program.assignment import same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.program.validate import check_program
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare
from entrain_bench.simulate import Simulator, place_actions
from entrain_bench.specs.layer import Gemm
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.parse import parse
from entrain_bench.specs.unet import UNetConfig, unet_layers
from entrain_bench_strategies.disttrain import DistTrainAssigner, DistTrainScheduler
from entrain_bench_strategies.disttrain.planner import Orchestration, SubProblem
from entrain_bench_workloads.synthetic import PackedWorkload
from support.builders import (
    TOKENS,
    find,
    llm_config,
    no_delay,
    placed,
    profile_of,
    random_samples,
    samples,
    tiny_cluster,
    tiny_job,
)
from support.disttrain import generating

SD1 = UNetConfig(4, (320, 640, 1280, 1280), (0, 1, 2), 2, 768, 77)


MODEL = generating()


def test_what_a_generator_waits_for_by_hand() -> None:
    # One stage a module, three ranks, two microbatches of one sample; the second is text only.
    layout = Layout(tuple(placed(module, [[[rank]]]) for rank, module in enumerate(MODEL.modules)), 2)
    shapes = samples((10, [40, 80]), (10, []))
    microbatch = np.arange(2)
    assignment = same_microbatches(MODEL, shapes, np.zeros(2, np.int64), microbatch, microbatch)
    assert [behind.tolist() for behind in stages_behind(layout, MODEL.llm_index)] == [[2], [1], [0]]
    program = chain_program(MODEL, shapes, layout, assignment, stages_behind(layout, MODEL.llm_index))
    check_program(program)
    forward, backward = (find(program, "image_out", kind, 0, [0, 1]) for kind in (Pass.FORWARD, Pass.BACKWARD))
    llm = [find(program, "llm", kind, 0, [0]) for kind in (Pass.FORWARD, Pass.BACKWARD)]
    waits = {
        action: dict(
            zip(
                program.dep_actions[program.dep_offsets[action] : program.dep_offsets[action + 1]].tolist(),
                program.dep_bytes[program.dep_offsets[action] : program.dep_offsets[action + 1]].tolist(),
                strict=True,
            )
        )
        for action in (forward, backward, llm[1])
    }
    hidden = 2 * 128 * (10 + 20)  # bf16, LLM width, LLM tokens of both items
    assert waits[forward] == {llm[0]: hidden}
    assert waits[backward] == {forward: 0}
    assert waits[llm[1]] == {llm[0]: 0, backward: hidden}
    start, _, _ = place_actions(program, np.ones(program.num_actions), no_delay(program))
    # rank 0: E0 .  .  .  .  G0   rank 1: .  L0 L1 .  B0 B1 (1F1B: two forwards, then backwards)   rank 2: .  .  F0 B0
    assert start[forward] == 2
    assert start[backward] == 3
    assert start[llm[1]] == 4
    assert start[find(program, "llm", Pass.BACKWARD, 0, [1])] == 5
    assert start[find(program, "vision", Pass.BACKWARD, 0, [0, 1])] == 5


@pytest.mark.wide
@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([(1, 2, 1), (2, 2, 2), (4, 2, 4), (1, 4, 2), (2, 4, 8), (3, 2, 1)]),
    st.tuples(*[st.integers(1, 3)] * 3),
    st.sampled_from(["none", "microbatch", "global_batch"]),
)
def test_any_degrees_run_above_the_bound(
    seed: int, dps: tuple[int, int, int], pps: tuple[int, int, int], intra: str
) -> None:
    shapes = random_samples(np.random.default_rng(seed), 2 * 3 * dps[1])
    cluster = tiny_cluster(4, 16)
    job = tiny_job(MODEL, cluster, global_batch=len(shapes))
    splits = [(*[1] * (pp - 1), len(m.layers) - pp + 1) for pp, m in zip(pps, MODEL.modules, strict=True)]
    layout = place_islands(job, [Island(1, 1, dp, split) for dp, split in zip(dps, splits, strict=True)], 3)
    profile = profile_of(job, shapes)
    assignment = DistTrainAssigner(intra).assign(shapes, layout, profile)
    program = DistTrainScheduler().schedule(shapes, layout, assignment, profile)
    truth = CostTruth(MODEL, cluster)
    timeline = Simulator(truth, 1e15).execute(program)
    assert lower_bound_s(truth, layout, shapes) <= timeline.iteration_time_s * (1 + 1e-9)


def test_encoder_and_generator_both_fill_the_pipeline() -> None:
    # One step of a microbatch of two samples: the LLM keeps one of 8 GPUs, the others are shared as the roots of works.
    profile = profile_of(tiny_job(MODEL, tiny_cluster(), global_batch=2), samples((500, [400])))
    space = Orchestration(profile, profile.samples.draw(1))
    encoder_s, llm_s, generator_s = (
        2 * sum(float(space.layer_s(module, 1).sum()) for module in group) for group in space.groups
    )
    expected = llm_s + (np.sqrt(encoder_s) + np.sqrt(generator_s)) ** 2 / 7
    assert space.solve([SubProblem(1, (1, 1, 1), (False,) * 3)])[0] == pytest.approx(expected, rel=1e-12)


# The U-Net


def test_unet_has_the_published_sizes() -> None:
    layers = unet_layers(SD1, 4096, ())
    # Parameters of runwayml/stable-diffusion-v1-5; MACs that thop counts for v1.4 without attention's products and with
    # norms (GitHub Nota-NetsPresso/BK-SDM, issue 53).
    assert sum(layer.parameters for layer in layers) == 859_520_964
    macs = sum(gemm.flops(np.array(4096.0)) for layer in layers for gemm in layer.gemms) / 2
    assert macs == pytest.approx(338_749_194_240, rel=1e-3)
    # Self-attention: five transformers on each of three levels and one in the middle, 2 x width x positions^2 each.
    scores = sum(
        layer.attention.flops(np.array([4096]))[0] / 2
        for layer in layers
        if layer.attention and not layer.attention.context_tokens
    )
    by_hand = 5 * sum(2 * c * n**2 for c, n in ((320, 4096), (640, 1024), (1280, 256))) + 2 * 1280 * 64**2
    assert scores == pytest.approx(by_hand)


def test_stable_diffusion_21_has_the_checkpoints_parameters() -> None:
    cell = ["model=mllm_9b", "workload=laion_packed", "cluster=a100x1280", "strategy=disttrain"]
    model = prepare(compose_cells(cell)[0].config).job.model
    projector = 4096 * 1024 + 1024
    assert model.generators[0].parameters - projector == 865_910_724
    assert model.llm.parameters == 6_738_415_616
    # 632M with head and positions (arXiv:2010.11929, Table 1).
    assert model.encoders[0].parameters - 4096 * (1280 + 1 + 4096 + 1) == pytest.approx(632e6, rel=5e-3)


def test_what_a_transformer_of_a_unet_moves_and_keeps_by_hand() -> None:
    layers = {layer.kind: layer for layer in unet_layers(parse(UNetConfig, _small_unet(), "unet"), 64, ())}
    c, rows, context = 16, 0.25, 4 / 64
    own, cross = layers["self-attention 16 x0.25"], layers["cross-attention 16 x0.25"]
    # Projection, group norm; queries, keys and values without bias, layer norm; projection.
    assert own.parameters == (c * c + c) + 2 * c + 3 * c * c + 2 * c + (c * c + c)
    # Two norms read and write c, a residual reads 2c and writes c.
    assert own.elementwise_bytes_per_token == 2 * rows * (2 * 2 * c + 3 * c)
    # Inputs of both norms and of the three products, queries, keys and values.
    assert own.activation_bytes_per_token == 2 * rows * 8 * c
    # Two norms (4c), three residuals (9c), GEGLU from 8c to 4c.
    assert cross.elementwise_bytes_per_token == 2 * rows * (4 * c + 9 * c + 12 * c)
    assert cross.activation_bytes_per_token == 2 * (19 * c * rows + 2 * c * context)
    assert own.input_bytes_per_token == cross.input_bytes_per_token == 2 * c * rows
    # The last norm at full resolution; enlarging is a kernel, shrinking part of its convolution.
    head = layers["head"]
    assert (head.elementwise_bytes_per_token, head.activation_bytes_per_token) == (2 * 2 * 8, 2 * 2 * 8)
    names = ("self-attention 16 x0.25", "cross-attention 16 x0.25", "residual 8-16 x0.25", "downsample 8 x0.25", "head")
    assert [layers[name].num_elementwise_kernels for name in names] == [3, 6, 3, 0, 1]
    assert [each.num_elementwise_kernels for kind, each in layers.items() if kind.startswith("upsample")] == [1]


def _small_unet() -> dict[str, object]:
    return {
        "in_channels": 4,
        "block_out_channels": [8, 16],
        "attention_levels": [1],
        "layers_per_block": 1,
        "cross_attention_dim": 8,
        "context_tokens": 4,
    }


def test_tensor_parallel_ranks_share_a_unets_images_and_hold_all_weights() -> None:
    model, cluster = generating(num_layers=0, unet=_small_unet()), tiny_cluster(launch_s=1e-15)
    unet = model.generators[0]
    assert unet.sharded_sizes == {}
    truth = CostTruth(model, cluster)
    alone = placed(unet, [[[0]]])
    wide = placed(unet, [[[0, 1, 2, 3]]], tp=4)
    assert truth.memory.stage_state_bytes(unet, alone)[0] == 18 * unet.parameters
    assert truth.memory.stage_state_bytes(unet, wide)[0] == pytest.approx((6 + 12 / 4) * unet.parameters)
    assert truth.step_costs.sync_s(unet, alone)[0] == 0
    assert truth.step_costs.sync_s(unet, wide)[0] > 0
    many = np.full(1, 64 * 4096)
    one, four = (truth.unit_times(unet, place, many) for place in (alone, wide))
    assert not four.forward_comm_s.any()
    assert 3.5 < one.forward_s[0, 0] / four.forward_s[0, 0] <= 4 + 1e-9


def test_a_strided_convolution_reads_each_value_for_a_quarter_of_the_taps() -> None:
    down = next(layer for layer in unet_layers(SD1, 4096, ()) if layer.kind.startswith("downsample 320"))
    assert down.gemms == (Gemm(2880, 320, rows_per_token=0.25, taps=2.25),)
    # 1024 outputs read 4096 x 320 inputs.
    assert 4096 * 0.25 * 2880 / 2.25 == 4096 * 320


# Packed samples


def packed(**changes: Any) -> PackedWorkload:
    sizes: dict[str, Any] = {"name": "p", "sequence_tokens": 100, "caption": 3, "image": 20}
    return PackedWorkload(**sizes | changes)


def test_pairs_fill_a_sequence_and_the_rest_is_padding() -> None:
    shapes = packed().source(_rules(2)).draw(5, np.random.default_rng(0))
    # 20 patches are 5 LLM tokens, a pair 8: twelve pairs are 96 tokens.
    assert np.diff(shapes.item_offsets).tolist() == [12] * 5
    assert set(shapes.item_encoder_tokens.tolist()) == {20}
    assert set(shapes.item_llm_tokens.tolist()) == {5}
    assert shapes.text_tokens.tolist() == [40] * 5
    assert shapes.llm_tokens.tolist() == [100] * 5


def test_packed_samples_are_random_access_and_all_one_length() -> None:
    sizes = {"kind": "lognormal", "median": 10, "sigma": 1.0, "min": 1, "max": 50}
    source = packed(image=sizes).source(_rules(1))
    first, again = source.batch(1, 300, 7), packed(image=sizes).source(_rules(1)).batch(1, 300, 7)
    assert np.array_equal(first.item_encoder_tokens, again.item_encoder_tokens)
    assert first.sample_ids.tolist() == list(range(300, 600))
    assert set(first.llm_tokens.tolist()) == {100}
    assert first.text_tokens.min() >= 3
    assert len(np.unique(np.diff(first.item_offsets))) > 3


def _rules(merge: int) -> Any:
    model = {"name": "m", "modules": {"llm": llm_config()}, "tokens": TOKENS | {"merge_patches": merge}}
    return ModelSpec.from_config(model).tokens
