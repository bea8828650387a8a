"""Communication of layers, what hides it, and what a split backward changes about both, worked by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from entrain_bench.costs.loads import compute_loads
from entrain_bench.costs.roofline import Roofline
from entrain_bench.specs.framework import FrameworkOptions
from support.builders import tiny_cluster, tiny_model

# 1e12 FLOP/s of products, 5e11 and 4e11 of attention forward and backward, 1e9 bytes/s of memory, launches of 1e-6 s.
CLUSTER = tiny_cluster(num_nodes=2, gpus_per_node=8)
LLM = tiny_model().llm


def seconds(times: Any) -> float:
    return float(np.asarray(times).reshape(-1)[0])


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
