"""Products of 8 bits by hand: rate, bytes and casts; where they are not known; and that the rest stays as it was."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.costs.loads import compute_loads
from entrain_bench.costs.roofline import Roofline
from entrain_bench.specs.framework import CAST_BYTES, FrameworkOptions
from entrain_bench.specs.layer import Gemm
from support.builders import tiny_cluster, tiny_model

LLM = tiny_model(encoder=1, llm=1).llm
CLUSTER = tiny_cluster(launch_s=0.0)
EIGHT = replace(CLUSTER, device=replace(CLUSTER.device, fp8_speedup=2.0))
TOKENS = np.array([1280.0])


def test_a_product_has_twice_the_rate_or_inputs_of_half_the_bytes() -> None:
    gemm = Gemm(128, 256)
    fast = replace(EIGHT, device=replace(EIGHT.device, memory_bandwidth_bytes_per_s=1e15))
    assert Roofline(fast).gemm_s(gemm, TOKENS, 1, 1, 2.0) == pytest.approx(
        Roofline(fast).gemm_s(gemm, TOKENS, 1, 1) / 2
    )
    slow = replace(EIGHT, device=replace(EIGHT.device, peak_bf16_flops=1e18))
    device = slow.device
    moved = 1280 * 128 + 128 * 256 + 2 * 1280 * 256
    seconds = moved / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)
    assert Roofline(slow).gemm_s(gemm, TOKENS, 1, 1, 2.0) == pytest.approx([seconds])


@pytest.mark.parametrize("precision", ["fp8", "fp8_block"])
def test_blocks_cast_inputs_and_gradients_of_outputs_and_ends_do_not(precision: str) -> None:
    roofline = Roofline(EIGHT, FrameworkOptions(precision=precision))
    plain = Roofline(EIGHT)
    loads = compute_loads(LLM, np.array([1280]), np.array([0, 1]))
    embed, block, head = LLM.layers
    for end in (embed, head):
        assert roofline.layer_s(end, loads, 1, 1) == plain.layer_s(end, loads, 1, 1)
    # Width 128, 8 heads and 4 of keys and values of 16, a gated MLP of 256.
    inputs, outputs = 128 + 128 + 128 + 256, 256 + 128 + 512 + 128
    each = 1280 * CAST_BYTES[precision] / roofline._elementwise_bytes_per_s
    saved = sum(
        float((plain.gemm_s(gemm, TOKENS, 1, 1) - plain.gemm_s(gemm, TOKENS, 1, 1, 2.0))[0]) for gemm in block.gemms
    )
    before, after = plain.layer_s(block, loads, 1, 1), roofline.layer_s(block, loads, 1, 1)
    assert float(after.forward_s[0]) == pytest.approx(float(before.forward_s[0]) - saved + each * inputs)
    assert float(after.backward_s[0]) == pytest.approx(float(before.backward_s[0]) - 2 * saved + each * outputs)


def test_unknown_rates_and_training_are_refused() -> None:
    options = FrameworkOptions(precision="fp8")
    with pytest.raises(UserError, match=r"precision=fp8: must be bf16 on .*: no rate of its 8-bit products is known"):
        options.check_device(CLUSTER.device)
    options.check_device(EIGHT.device)
    with pytest.raises(IncompatibleError, match=r"precision=fp8: must be bf16 with harness=train"):
        options.check_executable(LLM, 1, "train")
