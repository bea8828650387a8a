"""Times of layers and collectives worked by hand, and the properties that bounds and estimates rely on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.base.errors import UserError
from entrain_bench.costs.layer_times import PassTimes
from entrain_bench.costs.links import all_gather_s, all_reduce_s, broadcast_s
from entrain_bench.costs.loads import compute_loads, score_area
from entrain_bench.costs.roofline import Roofline
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare
from entrain_bench.specs.cluster import ClusterSpec, LinkTier
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.layer import Attention, Gemm, Layer
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from support.builders import TOKENS as TOKEN_RULES
from support.builders import (
    encoder_config,
    llm_config,
    tiny_cluster,
    tiny_model,
)

# 1e12 FLOP/s of products, 5e11 and 4e11 of attention forward and backward, 1e9 bytes/s of memory, launches of 1e-6 s.
CLUSTER = tiny_cluster(num_nodes=2, gpus_per_node=8)
MODEL = tiny_model()
LLM = MODEL.llm
WINDOWED = ModelSpec.from_config(
    {
        "name": "windowed",
        "modules": {
            "vision": encoder_config(4, window_tokens=64, full_attention_layers=[1, 3], gated_mlp=True),
            "audio": encoder_config(2, "audio", rotary=False, norm_bias=True),
            "llm": llm_config(2),
        },
        "tokens": TOKEN_RULES,
    }
)
KINDS = [(module.name, kind.kind) for module in WINDOWED.modules for kind in module.kinds]


def cluster_with(**device: Any) -> ClusterSpec:
    return replace(CLUSTER, device=replace(CLUSTER.device, **device))


def seconds(times: Any) -> float:
    return float(np.asarray(times).reshape(-1)[0])


COMPUTE_BOUND = cluster_with(memory_bandwidth_bytes_per_s=2e18, kernel_launch_s=1e-15)
MEMORY_BOUND = cluster_with(peak_bf16_flops=2e21, kernel_launch_s=1e-15)


@pytest.mark.parametrize(
    ("gemm", "tokens", "tp", "cp", "flops"),
    [
        # rows and columns of the output are padded to 128, the inner dimension is not
        (Gemm(100, 200), 129, 1, 1, 2 * 256 * 256 * 100),
        (Gemm(100, 200), 128, 2, 1, 2 * 128 * 128 * 100),  # column parallel: 200 / 2 columns, padded
        (Gemm(100, 200, row_parallel=True), 128, 2, 1, 2 * 128 * 256 * 50),
        (Gemm(100, 200), 300, 1, 2, 2 * 256 * 256 * 100),  # context parallel: 150 rows, padded
        (Gemm(100, 200, rows_per_token=0.25), 1025, 1, 1, 2 * 384 * 256 * 100),  # 256.25 rows are 257
    ],
)
def test_arithmetic_of_a_product_by_hand(gemm: Gemm, tokens: int, tp: int, cp: int, flops: int) -> None:
    time = Roofline(COMPUTE_BOUND).gemm_s(gemm, np.array([float(tokens)]), tp, cp)
    assert seconds(time) == pytest.approx(flops / 1e12, rel=1e-12)


@pytest.mark.parametrize(
    ("gemm", "tokens", "tp", "cp", "elements"),
    [
        (Gemm(100, 200), 10, 2, 1, 10 * 100 + 10 * 100 + 100 * 100),
        (Gemm(100, 200, row_parallel=True), 10, 2, 1, 10 * 50 + 10 * 200 + 50 * 200),
        (Gemm(100, 200), 11, 1, 2, 6 * 100 + 6 * 200 + 100 * 200),
    ],
)
def test_traffic_of_a_product_by_hand(gemm: Gemm, tokens: int, tp: int, cp: int, elements: int) -> None:
    time = Roofline(MEMORY_BOUND).gemm_s(gemm, np.array([float(tokens)]), tp, cp)
    assert seconds(time) == pytest.approx(2 * elements / 1e9, rel=1e-12)


def test_a_tiny_product_takes_a_launch() -> None:
    time = Roofline(cluster_with(kernel_launch_s=0.5)).gemm_s(Gemm(8, 8), np.array([1.0, 2.0]), 1, 1)
    assert time.tolist() == [0.5, 0.5]


def test_a_product_attains_half_of_the_limit_at_half_flops() -> None:
    # 1e12 FLOP/s at most; 128 x 128 x 100 products of 3276800 FLOPs.
    rate, time = cluster_with(memory_bandwidth_bytes_per_s=2e18, gemm_half_flops=3276800.0), np.array([128.0])
    assert seconds(Roofline(rate).gemm_s(Gemm(100, 128), time, 1, 1)) == pytest.approx(2 * 3276800 / 1e12, rel=1e-12)
    # At a fraction of the rate the FLOPs take longer, starting does not.
    slower = replace(rate, device=replace(rate.device, sustained_fraction=0.5))
    assert seconds(Roofline(slower).gemm_s(Gemm(100, 128), time, 1, 1)) == pytest.approx(3 * 3276800 / 1e12, rel=1e-12)


@pytest.mark.parametrize(
    ("attention", "length", "area"),
    [
        (Attention(128, 64, causal=False), 300, 384 * 320),
        # 3 query tiles of 128 that need 2, 4 and 5 key tiles of 64 would be 11 tiles; the formula says 10.5
        (Attention(128, 64, causal=True), 300, 384 * (320 + 128) // 2),
        (Attention(128, 64, causal=False, window_tokens=64), 150, 3 * 128 * 64),
        (Attention(128, 64, causal=False, rows_per_token=0.25), 1024, 256 * 256),
        (Attention(128, 64, causal=False, window_tokens=200), 210, 256 * 256 + 128 * 64),
    ],
)
def test_padded_score_area_by_hand(attention: Attention, length: int, area: int) -> None:
    assert score_area(attention, np.array([length])).tolist() == [area]


def causal_tiles(length: int) -> int:
    """Elements of the 128 x 64 tiles of which a causal kernel needs any element."""
    rows, columns = -(-length // 128), -(-length // 64)
    return 128 * 64 * sum(64 * column < 128 * (row + 1) for row in range(rows) for column in range(columns))


def test_causal_area_is_the_count_of_needed_tiles_where_sizes_are_whole_tiles() -> None:
    lengths = np.arange(128, 4097, 128)
    area = score_area(Attention(128, 64, causal=True), lengths)
    assert area.tolist() == [causal_tiles(int(length)) for length in lengths]


def test_attention_time_by_hand() -> None:
    attention = Attention(128, 64, causal=True)
    forward, backward = Roofline(CLUSTER).attention_s(attention, np.array([86016.0]), np.array([512.0]), 1, 1)
    assert seconds(forward) == pytest.approx(4 * 128 * 86016 / 5e11, rel=1e-12)
    assert seconds(backward) == pytest.approx(2.5 * 4 * 128 * 86016 / 4e11, rel=1e-12)
    forward, backward = Roofline(CLUSTER).attention_s(attention, np.array([86016.0]), np.array([512.0]), 2, 4)
    assert seconds(forward) == pytest.approx(4 * 128 * 86016 / 8 / 5e11, rel=1e-12)


def test_short_sequences_and_narrow_heads_are_slower() -> None:
    # 100 tokens count as 100 x 50 elements more, a head of 64 against 128 as (1 + 32 / 64) / (1 + 32 / 128) = 1.2.
    device = {"attention_half_tokens": 50.0, "attention_half_head_dim": 32.0, "sustained_fraction": 0.5}
    roofline, tokens = Roofline(cluster_with(**device)), np.array([100.0])
    for head_dim, slower in ((128, 1.0), (64, 1.2)):
        attention = Attention(128, 64, causal=False, head_dim=head_dim)
        forward, backward = roofline.attention_s(attention, np.array([16384.0]), tokens, 1, 1)
        flops = slower * 4 * 128 * (16384 + 5000)
        assert seconds(forward) == pytest.approx(flops / 2.5e11, rel=1e-12)
        assert seconds(backward) == pytest.approx(2.5 * flops / 2e11, rel=1e-12)


# Properties that the lower bound relies on

lengths_lists = st.lists(st.integers(1, 3000), min_size=1, max_size=6)


def layer_of(module: str, kind: str) -> tuple[ModuleSpec, Layer]:
    spec = WINDOWED.module(module)
    return spec, next(layer for layer in spec.kinds if layer.kind == kind)


# Of the order of the products and sequences tested, so that they decide.
SATURATING = cluster_with(
    sustained_fraction=0.7,
    gemm_half_flops=1e7,
    attention_half_tokens=300.0,
    attention_half_head_dim=44.0,
    gemm_half_width=200.0,
    elementwise_efficiency=0.7,
    overlap_cost=0.4,
    host_launch_s=2e-5,
)


def packed(cluster: ClusterSpec, module: str, kind: str, chunks: list[list[int]], tp: int, cp: int) -> PassTimes:
    spec, layer = layer_of(module, kind)
    flat = np.array([length for chunk in chunks for length in chunk])
    offsets = np.cumsum([0, *map(len, chunks)])
    return Roofline(cluster).layer_s(layer, compute_loads(spec, flat, offsets), tp, cp)


def monotone(times: PassTimes) -> dict[str, Any]:
    """Times that never fall as work grows; exposed communication of a backward may, as more can hide it."""
    columns = {name: getattr(times, name) for name in ("forward_s", "forward_comm_s", "backward_s", "total_s")}
    return columns | {"backward": times.backward_s + times.backward_comm_s}


@pytest.mark.wide
@pytest.mark.parametrize("cluster", [CLUSTER, SATURATING], ids=["linear", "saturating"])
@pytest.mark.parametrize(("module", "kind"), KINDS)
@settings(max_examples=40, deadline=None)
@given(lengths_lists, lengths_lists, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_packing_two_chunks_into_one_never_takes_longer(
    cluster: ClusterSpec, module: str, kind: str, one: list[int], other: list[int], tp: int, cp: int
) -> None:
    times = packed(cluster, module, kind, [one, other, one + other], tp, cp)
    for column, (first, second, both) in monotone(times).items():
        assert both <= (first + second) * (1 + 1e-12), column
        assert both >= max(first, second) * (1 - 1e-12), column


@pytest.mark.wide
@pytest.mark.parametrize("cluster", [CLUSTER, SATURATING], ids=["linear", "saturating"])
@pytest.mark.parametrize(("module", "kind"), KINDS)
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 3000), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_longer_sequences_never_take_less(
    cluster: ClusterSpec, module: str, kind: str, length: int, more: int, tp: int, cp: int
) -> None:
    times = packed(cluster, module, kind, [[length], [length + more]], tp, cp)
    for column, (short, long) in monotone(times).items():
        assert short <= long * (1 + 1e-12), column


LOADS = compute_loads(LLM, np.array([100]))
BLOCK = LLM.kinds[1]


def layer(cluster: ClusterSpec, framework: FrameworkOptions, tp: int = 1, split: bool = False) -> PassTimes:
    return Roofline(cluster, framework).layer_s(BLOCK, LOADS, tp, 1, split)


def test_collectives_start_late_and_attain_a_part_of_their_links() -> None:
    tier = LinkTier("half", 8, 1e9, 1e-6, collective_efficiency=0.5, collective_start_s=7e-6)
    assert seconds(all_gather_s(8000, 4, tier)) == pytest.approx(7e-6 + 3e-6 + 12e-6, rel=1e-12)
    # One kernel: it starts once, and passes the bytes on twice.
    assert seconds(all_reduce_s(8000, 4, tier)) == pytest.approx(7e-6 + 6e-6 + 24e-6, rel=1e-12)
    assert seconds(broadcast_s(8000, 4, tier)) == pytest.approx(7e-6 + 3e-6 + 16e-6, rel=1e-12)
    alone = [seconds(call(8000, 1, tier)) for call in (all_gather_s, all_reduce_s, broadcast_s)]
    assert alone == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("gemm", "tp", "slower"),
    [
        # 1 / width is the mean of 1 / 128 and 1 / 128 on a rank; at that width a product has half of its rate.
        (Gemm(512, 128, row_parallel=True), 4, 2.0),
        (Gemm(128, 384), 1, 1 + 128 * (1 / 128 + 1 / 384) / 2),
    ],
)
def test_narrow_products_are_slower(gemm: Gemm, tp: int, slower: float) -> None:
    rate = {"memory_bandwidth_bytes_per_s": 2e18, "kernel_launch_s": 1e-15}
    wide, narrow = (Roofline(cluster_with(**rate, gemm_half_width=width)) for width in (0.0, 128.0))
    tokens = np.array([512.0])
    assert seconds(narrow.gemm_s(gemm, tokens, tp, 1)) == pytest.approx(
        slower * seconds(wide.gemm_s(gemm, tokens, tp, 1)), rel=1e-12
    )


@pytest.mark.parametrize(
    ("own", "kernel", "ahead", "back"),
    [
        ("flash3", "flash1", 3.5, 3.25),
        ("flash3", None, 1.0, 1.0),
    ],
)
def test_older_attention_kernels_are_slower(own: str, kernel: str | None, ahead: float, back: float) -> None:
    cluster = cluster_with(attention_kernel=own)
    given_s, own_s = (
        Roofline(cluster, FrameworkOptions(attention_kernel=each)).attention_s(
            Attention(128, 64, causal=True), np.array([86016.0]), np.array([512.0]), 1, 1
        )
        for each in (kernel, own)
    )
    assert [seconds(each) for each in own_s] == [4 * 128 * 86016 / 5e11, 2.5 * 4 * 128 * 86016 / 4e11]
    assert [seconds(a) / seconds(b) for a, b in zip(given_s, own_s, strict=True)] == pytest.approx(
        [ahead, back], rel=1e-12
    )


def test_unfused_attention_stores_all_scores() -> None:
    framework = FrameworkOptions(attention_kernel="unfused")
    roofline = Roofline(CLUSTER, framework)
    # 200 causal tokens: 256 x 256 scores, none skipped, of 8 heads of 16; bf16.
    loads = roofline.loads(LLM, np.array([200]))
    assert loads.areas["block"].tolist() == [256 * 256]
    attention = BLOCK.attention
    assert attention is not None
    forward, backward = roofline.attention_s(attention, loads.areas["block"], loads.tokens, 2, 1)
    scores = 8 * 256 * 256 / 2
    assert seconds(forward) == pytest.approx(scores * (4 * 16 / 1e12 + 4 * 2 / 1e9), rel=1e-12)
    assert seconds(backward) == pytest.approx(scores * (8 * 16 / 1e12 + 7 * 2 / 1e9), rel=1e-12)


@pytest.mark.parametrize("split", [False, True])
def test_a_layer_lasts_as_long_as_the_host_issues_its_kernels(split: bool) -> None:
    # Four products, seven elementwise kernels, attention; in backward twice, twice and once.
    times = layer(cluster_with(host_launch_s=1.0), FrameworkOptions(), split=split)
    assert seconds(times.forward_s) == 4 + 7 + 1
    assert seconds(times.backward_s) == 8 + 14 + 1 - 4 * split
    assert (times.weight_s is None) != split
    if times.weight_s is not None:
        assert seconds(times.weight_s) == 4
    quick = layer(cluster_with(host_launch_s=1e-15), FrameworkOptions())
    assert quick == layer(CLUSTER, FrameworkOptions())


def test_kernels_that_a_device_cannot_run_are_refused() -> None:
    with pytest.raises(UserError, match="attention_kernel=flash3: must be one of unfused, flash1, flash2 on A40"):
        prepare(compose_cells(["attention_kernel=flash3"])[0].config)


def test_communication_of_a_layer_by_hand() -> None:
    # 100 tokens of 128 x 2 bytes: 25600 bytes. Pairs: 1e-6 s and 1e9 bytes/s; node: 2e-6 s and 5e8; network: 1e-5, 1e8.
    block, loads = LLM.kinds[1], compute_loads(LLM, np.array([100]))

    def comm(tp: int, cp: int) -> tuple[float, float]:
        times = Roofline(CLUSTER).layer_s(block, loads, tp, cp)
        return seconds(times.forward_comm_s), seconds(times.backward_comm_s)

    pair, node = 1e-6 + 25600 / 2 / 1e9, 3 * 2e-6 + 25600 * 3 / 4 / 5e8
    # Four gathers or scatters a pass and two more gathers in backward, of which four hide under longer products.
    assert comm(2, 1) == pytest.approx((4 * pair, 2 * pair), rel=1e-12)
    assert comm(4, 1) == pytest.approx((4 * node, 2 * node), rel=1e-12)
    # Keys and values of all tokens: 100 x 2 x 64 x 2 bytes, over pairs; backward scatters gradients as well.
    assert comm(1, 2) == pytest.approx((pair, 2 * pair), rel=1e-12)
    # Both: TP groups are pairs and hold half the tokens; CP groups stride over 4 ranks and hold half the heads.
    tp_part = 4 * (1e-6 + 12800 / 2 / 1e9)
    cp_part = 2e-6 + 12800 / 2 / 5e8
    assert comm(2, 2) == pytest.approx((tp_part + cp_part, tp_part / 2 + 2 * cp_part), rel=1e-12)
    # Both nodes: data leave each over the links of its eight ranks.
    wide = 15 * 1e-5 + 25600 * 15 / 16 / 8e8
    assert comm(1, 16) == pytest.approx((wide, 2 * wide), rel=1e-12)


def test_whole_hidden_states_are_reduced_without_sequence_parallelism() -> None:
    # Two all-reduces a pass, each as long as a gather and a scatter; products for weights hide those of backward.
    block, loads = LLM.kinds[1], compute_loads(LLM, np.array([100]))
    times = Roofline(CLUSTER, FrameworkOptions(sequence_parallel=False)).layer_s(block, loads, 2, 1)
    assert seconds(times.forward_comm_s) == pytest.approx(4 * (1e-6 + 25600 / 2 / 1e9), rel=1e-12)
    assert seconds(times.backward_comm_s) == 0.0


# A gather of 100 tokens over 16 ranks.
WIDE = 15 * 1e-5 + 25600 * 15 / 16 / 1e8


def test_no_more_communication_hides_than_there_is_compute() -> None:
    loads = compute_loads(LLM, np.array([100]))
    times = Roofline(CLUSTER, FrameworkOptions(tp_overlap=1.0)).layer_s(LLM.kinds[1], loads, 16, 1)
    assert seconds(times.forward_s + times.forward_comm_s) == pytest.approx(4 * WIDE, rel=1e-12)
    assert seconds(times.backward_s + times.backward_comm_s) == pytest.approx(6 * WIDE, rel=1e-12)
    near = Roofline(CLUSTER, FrameworkOptions(tp_overlap=1.0)).layer_s(LLM.kinds[1], loads, 2, 1)
    assert seconds(near.forward_comm_s) == seconds(near.backward_comm_s) == 0.0
    plain, some = (
        Roofline(CLUSTER, FrameworkOptions(tp_overlap=f)).layer_s(LLM.kinds[1], loads, 2, 1) for f in (0.0, 0.25)
    )
    for column in ("forward_comm_s", "backward_comm_s"):
        assert seconds(getattr(some, column)) == pytest.approx(0.75 * seconds(getattr(plain, column)), rel=1e-12)
