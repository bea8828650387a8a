"""Overlap, narrow products, kernel generations, launches and collectives: worked by hand, and off by default."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.costs.links import all_gather_s, all_reduce_s, broadcast_s
from entrain_bench.costs.loads import compute_loads
from entrain_bench.costs.roofline import PassTimes, Roofline
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare
from entrain_bench.specs.cluster import ClusterSpec, LinkTier, Speed
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.layer import Attention, Gemm
from support.builders import tiny_cluster, tiny_model

# 1e12 FLOP/s of products, 5e11 and 4e11 of attention forward and backward, 1e9 bytes/s of memory, launches of 1e-6 s.
CLUSTER = tiny_cluster(num_nodes=2, gpus_per_node=8)
MODEL = tiny_model()
LLM = MODEL.llm
LOADS = compute_loads(LLM, np.array([100]))
BLOCK = LLM.kinds[1]


def cluster_with(**device: Any) -> ClusterSpec:
    return replace(CLUSTER, device=replace(CLUSTER.device, **device))


def seconds(times: Any) -> float:
    return float(np.asarray(times).reshape(-1)[0])


def layer(cluster: ClusterSpec, framework: FrameworkOptions, tp: int = 1, split: bool = False) -> PassTimes:
    return Roofline(cluster, framework).layer_s(BLOCK, LOADS, tp, 1, split)


# Collectives


def test_collectives_start_late_and_attain_a_part_of_their_links() -> None:
    tier = LinkTier("half", 8, 1e9, 1e-6, collective_efficiency=0.5, collective_start_s=7e-6)
    assert seconds(all_gather_s(8000, 4, tier)) == pytest.approx(7e-6 + 3e-6 + 12e-6, rel=1e-12)
    # One kernel: it starts once, and passes the bytes on twice.
    assert seconds(all_reduce_s(8000, 4, tier)) == pytest.approx(7e-6 + 6e-6 + 24e-6, rel=1e-12)
    assert seconds(broadcast_s(8000, 4, tier)) == pytest.approx(7e-6 + 3e-6 + 16e-6, rel=1e-12)
    alone = [seconds(call(8000, 1, tier)) for call in (all_gather_s, all_reduce_s, broadcast_s)]
    assert alone == [0.0, 0.0, 0.0]


# Products


@pytest.mark.parametrize(
    ("gemm", "tp", "slower"),
    [
        # 1 / width is the mean of 1 / 128 and 1 / 128 on a rank; at that width a product has half of its rate.
        (Gemm(128, 128), 1, 2.0),
        (Gemm(128, 512), 4, 2.0),
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


# Attention, norms, and all else that moves data


def test_products_of_unfused_attention_are_as_narrow_as_a_head() -> None:
    device = {"memory_bandwidth_bytes_per_s": 2e18, "kernel_launch_s": 1e-15, "attention_kernel": "unfused"}
    wide, narrow = (Roofline(cluster_with(**device, gemm_half_width=width)) for width in (0.0, 64.0))
    attention, area, tokens = Attention(128, 128, False, head_dim=32), np.array([1e6]), np.array([1e3])
    for one, other in zip(
        wide.attention_s(attention, area, tokens, 1, 1), narrow.attention_s(attention, area, tokens, 1, 1), strict=True
    ):
        assert seconds(other) == pytest.approx(2 * seconds(one), rel=1e-6)


@pytest.mark.parametrize(
    ("own", "kernel", "ahead", "back"),
    [
        ("flash2", "flash1", 2.0, 2.0),
        ("flash3", "flash2", 1.75, 1.625),
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


# Launches


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


# Overlap


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_at_full_cost_nothing_of_tensor_parallel_communication_hides(sequence_parallel: bool, split: bool) -> None:
    framework = FrameworkOptions(sequence_parallel=sequence_parallel, tp_overlap=0.6)
    free, half, full = (layer(cluster_with(overlap_cost=cost), framework, 2, split) for cost in (0.0, 0.5, 1.0))
    one = 1e-6 + 25600 / 2 / 1e9
    assert seconds(full.forward_comm_s) == pytest.approx(4 * one, rel=1e-12)
    assert seconds(full.backward_comm_s) == pytest.approx((6 if sequence_parallel else 4) * one, rel=1e-12)
    for name in ("forward_comm_s", "backward_comm_s"):
        middle = (seconds(getattr(free, name)) + seconds(getattr(full, name))) / 2
        assert seconds(getattr(half, name)) == pytest.approx(middle, rel=1e-12)


# Settings


def test_a_faster_host_and_dearer_overlap() -> None:
    cluster = cluster_with(host_launch_s=2e-6, overlap_cost=0.6).at(Speed(launch=0.5, overlap=3.0))
    assert (cluster.device.host_launch_s, cluster.device.overlap_cost) == (1e-6, 1.0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["attention_kernel=flash4"], "attention_kernel=flash4: unknown"),
        (
            ["attention_kernel=flash3"],
            "attention_kernel=flash3: must be one of unfused, flash1, flash2 on A40, or null",
        ),
        (["cluster.device.attention_kernel=slow"], "cluster.device.attention_kernel=slow: unknown"),
    ],
)
def test_wrong_settings_are_named(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepare(compose_cells([*overrides])[0].config)


def test_what_really_runs_has_the_kernels_of_its_machine() -> None:
    framework = FrameworkOptions(attention_kernel="unfused")
    with pytest.raises(IncompatibleError, match="attention_kernel=unfused: must be null with harness=train"):
        framework.check_executable(LLM, 1, "train")
