"""Experts and expert parallelism by hand: products, exchange on eight ranks, states, and what meeting means."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.costs.links import all_to_all_s, peers_by_tier
from entrain_bench.costs.loads import compute_loads
from entrain_bench.costs.memory import Memory
from entrain_bench.costs.roofline import Roofline
from entrain_bench.costs.sharding import gathered_bytes, layer_traffic
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program.layout import check_experts
from entrain_bench.specs.layer import Gemm
from entrain_bench.specs.model import ModelSpec
from support.builders import TOKENS, llm_config, placed, tiny_cluster

EXPERTS = {"count": 8, "top_k": 2, "ffn_hidden_size": 32, "shared_ffn_hidden_size": 16, "dense_layers": [0]}
LLM = ModelSpec.from_config(
    {"name": "mixture", "modules": {"llm": llm_config(2, experts=EXPERTS)}, "tokens": TOKENS}
).llm
DENSE, MIXED = LLM.layers[1], LLM.layers[2]
CLUSTER = tiny_cluster(2, 4)  # pairs of 1e9 bytes/s, nodes of four of 5e8, a network of 1e8
RANKS = np.arange(8)[:, None, None]


def test_parameters_that_there_are_and_that_a_token_meets() -> None:
    expert = 3 * 128 * 32
    attention = 128 * (128 + 2 * 64) + 128 * 128
    others = attention + 2 * 128 + 128 * 8 + 3 * 128 * 16
    assert (DENSE.kind, MIXED.kind) == ("block", "expert_block")
    assert MIXED.parameters == others + 8 * expert
    assert DENSE.parameters == attention + 2 * 128 + 3 * 128 * 256
    assert LLM.parameters - LLM.active_parameters == 6 * expert
    # A token's products: those of attention, the router, two experts and what all tokens share; then its scores.
    products = attention + 128 * 8 + 2 * expert + 3 * 128 * 16
    assert MIXED.forward_flops(np.array([10])).tolist() == [10 * 2 * products + 0.5 * 4 * 128 * 10 * 10]


def test_a_grouped_product_fills_tiles_of_each_group_and_reads_all_weights() -> None:
    gemm = Gemm(128, 64, rows_per_token=2.0, groups=8)
    roofline = Roofline(tiny_cluster())
    # 2 x 600 rows are 150 a group, two tiles of 128; at 1e12 FLOP/s, where memory is no limit.
    fast = replace(CLUSTER, device=replace(CLUSTER.device, memory_bandwidth_bytes_per_s=1e15))
    seconds = Roofline(fast).gemm_s(gemm, np.array([600.0]), 1, 1)[0]
    assert seconds == pytest.approx(2 * 128 * 128 * 8 * 256 / 1e12)
    # Few rows: weights of all groups at 1e9 bytes/s decide. Three rows reach three of them.
    assert roofline.gemm_s(gemm, np.array([16.0]), 1, 1)[0] == pytest.approx(2 * (32 * (128 + 64) + 8 * 128 * 64) / 1e9)
    assert roofline.gemm_s(gemm, np.array([1.5]), 1, 1)[0] == pytest.approx(2 * (3 * (128 + 64) + 3 * 128 * 64) / 1e9)


def test_exchange_on_eight_ranks() -> None:
    def seconds(groups: np.ndarray) -> float:
        (peers,) = peers_by_tier(groups, CLUSTER)
        return float(all_to_all_s(8e6, peers, CLUSTER.tiers))

    # Each rank keeps an eighth; one is behind the pair's link, two behind the node's, four behind the network's.
    assert peers_by_tier(np.arange(8)[None], CLUSTER) == [[1, 2, 4]]
    assert seconds(np.arange(8)[None]) == pytest.approx(1e-6 + 2 * 2e-6 + 4 * 1e-5 + 4e6 / 1e8)
    # Inside nodes: a quarter each for the pair and two others.
    assert seconds(np.arange(8).reshape(2, 4)) == pytest.approx(1e-6 + 2 * 2e-6 + 4e6 / 5e8)
    # Pairs; and the same places of two nodes.
    assert seconds(np.arange(8).reshape(4, 2)) == pytest.approx(1e-6 + 4e6 / 1e9)
    assert seconds(np.arange(8).reshape(2, 4).T) == pytest.approx(1e-5 + 4e6 / 1e8)
    assert float(all_to_all_s(8e6, [0, 0, 0], CLUSTER.tiers)) == 0.0


def test_a_pass_dispatches_and_combines_every_copy_once() -> None:
    tokens = np.array([1000])
    loads = compute_loads(LLM, tokens)
    roofline = Roofline(CLUSTER)
    own = placed(LLM, RANKS)
    alone = roofline.layers_s(LLM, loads, 1, 1)
    for ep, moved in ((2, 1 / 2 / 1e9), (4, 2 / 4 / 5e8), (8, 4 / 8 / 1e8)):
        groups = replace(own, ep=ep).expert_groups
        dense, mixed = roofline.layers_s(LLM, loads, 1, 1, groups=groups)[1:3]
        latency = {2: 1e-6, 4: 5e-6, 8: 4.5e-5}[ep]
        # Two bytes of 128 values of 2 copies of 1000 tokens, there and back.
        expected = 2 * (latency + 2 * 128 * 2 * 1000 * moved)
        assert mixed.forward_comm_s[0] == pytest.approx(expected)
        assert mixed.backward_comm_s[0] == pytest.approx(expected)
        assert dense.forward_comm_s[0] == 0.0
        # Rows are as many; a rank reads and fills fewer groups.
        assert mixed.forward_s[0] < alone[2].forward_s[0]


def test_an_uneven_router_makes_the_busiest_rank_wait_for() -> None:
    # Expected greatest of two and of eight normal numbers; a rank of two has the mean of four experts.
    uneven = replace(MIXED, expert_load_std=0.4)
    assert uneven.busiest_experts(1) == 1.0
    assert uneven.busiest_experts(2) == pytest.approx(1 + 0.4 / 4**0.5 * 0.5642)
    assert uneven.busiest_experts(8) == pytest.approx(1 + 0.4 * 1.4236)
    assert MIXED.busiest_experts(8) == 1.0


def test_states_of_experts_are_shared_out_among_the_ranks_that_hold_them() -> None:
    model = ModelSpec.from_config({"name": "m", "modules": {"llm": llm_config(2, experts=EXPERTS)}, "tokens": TOKENS})
    memory = Memory(model)
    own = placed(LLM, RANKS)
    experts = 8 * 3 * 128 * 32
    others = LLM.parameters - experts
    for ep in (1, 2, 8):
        # bf16 weights, fp32 gradients; fp32 weights and two moments over all ranks, and over those with these experts.
        expected = others * (6 + 12 / 8) + experts / ep * (6 + 12 / (8 / ep))
        assert memory.stage_state_bytes(LLM, replace(own, ep=ep))[0] == pytest.approx(expected)


def test_sharded_experts_by_hand() -> None:
    # Four ranks, a node, divide eight experts; ranks r and r + 4 hold the same two and gather them from each other.
    model = ModelSpec.from_config({"name": "m", "modules": {"llm": llm_config(2, experts=EXPERTS)}, "tokens": TOKENS})
    expert = 3 * 128 * 32
    rest = MIXED.parameters - 8 * expert
    own = replace(placed(LLM, RANKS), ep=4, sharding="zero3")
    traffic = layer_traffic(LLM, own, CLUSTER)
    # The network has 1e-5 s, and 1e8 bytes/s for each rank: the ring of all eight has the links of a node's four.
    for size, seconds in ((2, traffic.gather_s), (4, traffic.scatter_s)):
        assert seconds[1] == pytest.approx(7e-5 + size * DENSE.parameters * 7 / 8 / 4e8, rel=1e-12)
        assert seconds[2] == pytest.approx(8e-5 + size * (rest * 7 / 8 / 4e8 + 2 * expert / 2 / 1e8), rel=1e-12)
    pairs = 128_000 + DENSE.parameters, DENSE.parameters + rest + 2 * expert, rest + 2 * expert + 128_128
    whole = 2 * max(pairs)
    heaviest = max(DENSE.parameters, rest + 2 * expert, 128_128)
    assert gathered_bytes(LLM, own, 2) == (whole, whole + 4 * heaviest)
    memory = Memory(model)
    experts, others = 8 * expert, LLM.parameters - 8 * expert
    for kind, expected in {
        "zero3": 16 * LLM.parameters / 8,
        "zero3_kept": 16 * LLM.parameters / 8 + 2 * (others + experts / 4),
        "zero2": others * (2 + 16 / 8) + experts / 4 * (2 + 16 / 2),
    }.items():
        assert memory.stage_state_bytes(LLM, replace(own, sharding=kind))[0] == pytest.approx(expected, rel=1e-12)
    # Gradients are scattered in passes; of ZeRO-2 the step gathers weights, of ZeRO-3 nothing.
    steps = CostTruth(model, CLUSTER).step_costs
    assert steps.sync_s(LLM, own)[0] == steps.gather_s(LLM, own)[0] == 0.0
    kept = replace(own, sharding="zero2")
    assert (steps.sync_s(LLM, kept)[0], steps.gather_s(LLM, kept)[0] > 0) == (0.0, True)
    assert steps.optimizer_s(LLM, own)[0] == steps.optimizer_s(LLM, replace(own, sharding="zero1"))[0]


def test_states_of_a_published_model_are_those_that_users_see() -> None:
    # Qwen3-VL-30B-A3B: 30.53e9 parameters of the LLM and 0.54e9 of the encoder; users read 62 GB on each of 8 ranks.
    sizes = {"num_layers": 48, "hidden_size": 2048, "num_heads": 32, "num_kv_heads": 4, "head_dim": 128}
    experts = {"count": 128, "top_k": 8, "ffn_hidden_size": 768}
    config = llm_config(48, **sizes, vocab_size=151936, experts=experts)
    model = ModelSpec.from_config({"name": "m", "modules": {"llm": config}, "tokens": TOKENS})
    assert model.llm.parameters == pytest.approx(30.53e9, rel=1e-3)
    assert model.llm.active_parameters == pytest.approx(3.35e9, rel=1e-3)
    own = placed(model.llm, RANKS)
    sharded = Memory(model).stage_state_bytes(model.llm, replace(own, sharding="zero3"))[0]
    assert sharded + 0.54e9 * 16 / 8 == pytest.approx(62e9, rel=0.01)
    # With experts on 8 ranks and ZeRO-1 the states of one exceed an H100's 80 GB.
    assert Memory(model).stage_state_bytes(model.llm, replace(own, ep=8))[0] == pytest.approx(77.3e9, rel=0.01)


@pytest.mark.parametrize(
    ("ep", "changes", "line"),
    [
        (3, {}, r"layout\.ep=3: must be a divisor of the 8 experts"),
        (4, {"ranks": RANKS[:2]}, r"layout\.ep=4: must be a divisor of dp x cp=2"),
        (2, {"sharding": "hybrid"}, r"layout\.ep=2: must be 1 with layout\.sharding=hybrid"),
        (2, {"widths": ((1, 1),)}, r"layout\.ep=2: must be 1 with groups of several widths"),
    ],
)
def test_degrees_that_cannot_be(ep: int, changes: dict[str, object], line: str) -> None:
    with pytest.raises(UserError, match=line):
        check_experts(replace(placed(LLM, RANKS), ep=ep, **changes), LLM)  # type: ignore[arg-type]
    dense = ModelSpec.from_config({"name": "m", "modules": {"llm": llm_config(2)}, "tokens": TOKENS}).llm
    with pytest.raises(UserError, match="has no experts"):
        check_experts(replace(placed(dense, RANKS), ep=2), dense)


def test_replicas_share_the_work_of_experts_and_wait_for_the_longest_attention() -> None:
    model = ModelSpec.from_config({"name": "m", "modules": {"llm": llm_config(2, experts=EXPERTS)}, "tokens": TOKENS})
    truth = CostTruth(model, CLUSTER)
    own = replace(placed(LLM, RANKS[:2]), ep=2)
    loads = compute_loads(LLM, np.array([3000, 1000]))
    shared = replace(loads, routed=np.array([2000.0, 2000.0]))
    kinds = truth.layer_times.layers_s(LLM, shared, 1, 1, groups=own.expert_groups)
    plain = truth.layer_times.layers_s(LLM, loads, 1, 1, groups=own.expert_groups)
    longer, shorter = kinds[2].forward_s
    # Both have the products of 2,000 tokens' experts: the longer one less, the shorter one more than by itself.
    assert plain[2].forward_s[1] < shorter < longer < plain[2].forward_s[0]
