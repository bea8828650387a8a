"""Our messages beside megatron-core's bridge communicators, an independent oracle, where those can carry a boundary."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from entrain_bench.program import Pass, Program
from entrain_bench.program.layout import Layout
from entrain_bench.train.messages.rank_plan import plan_rank
from entrain_bench.train.platform import MODULES, prepare_platform
from support.builders import placed, samples, tiny_model
from support.train.bridge import (
    BRIDGE_MODULES,
    Bridge,
    ColocatedBridge,
    Messages,
    Tensors,
    even_program,
    grid_of,
    handed_rows,
)
from support.train.faults import reverse_rows
from support.train.ranks import run_ranks

MODEL = tiny_model(encoder=2, llm=2)
VISION, LLM = MODEL.modules
RANKS, NUM_MICROBATCHES = 4, 3


def layouts() -> dict[str, Layout]:
    def layout(vision: object, llm: object, vision_tp: int = 1, llm_tp: int = 1) -> Layout:
        return Layout((placed(VISION, vision, vision_tp), placed(LLM, llm, llm_tp)), NUM_MICROBATCHES)

    each, pairs = [[[0]], [[1]], [[2]], [[3]]], [[[0, 1]], [[2, 3]]]
    later, fours = [[[4, 5]], [[6, 7]]], [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    return {
        "fan_in_wider_llm": layout(each[:2], [[[2, 3]]], llm_tp=2),
        "fan_out_wider_encoder": layout([[[0, 1]]], each[2:], vision_tp=2),
        "equal": layout(each[:2], each[2:]),
        "colocated_fan_in": layout(each, pairs, llm_tp=2),
        "colocated_fan_out": layout(pairs, each, vision_tp=2),
        "colocated_equal": layout(each, each),
        # On eight ranks.
        "tp2_dp2_to_tp4_dp1": layout(pairs, fours[1:], vision_tp=2, llm_tp=4),
        "tp4_dp1_to_tp2_dp2": layout(fours[:1], later, vision_tp=4, llm_tp=2),
        "tp1_dp4_to_tp4_dp1": layout(each, fours[1:], llm_tp=4),
        "tp4_dp1_to_tp1_dp4": layout(fours[:1], [[[4]], [[5]], [[6]], [[7]]], vision_tp=4),
        "colocated_tp2_dp4_to_tp4_dp2": layout([*pairs, *later], fours, vision_tp=2, llm_tp=4),
        "colocated_tp4_dp2_to_tp2_dp4": layout(fours, [*pairs, *later], vision_tp=4, llm_tp=2),
    }


LAYOUTS = layouts()
WIDE = {name for name in LAYOUTS if "_to_" in name}


def program_of(layout: Layout, uneven: bool) -> Program:
    """Two samples of one item for every replica and microbatch, all of one size or all of different ones."""
    count = 2 * NUM_MICROBATCHES * max(module.dp for module in layout.modules)
    tokens = 4 * (np.random.default_rng(0).permutation(count) + 1 if uneven else np.full(count, 5))
    return even_program(MODEL, layout, samples(*[(3, [size]) for size in tokens.tolist()]), NUM_MICROBATCHES)


def handed(program: Program, rank: int, with_sizes: bool = True) -> Tensors:
    """Random rows, alike on the ranks of a tensor-parallel group; with the sizes by which a bridge splits them."""
    tensors: Tensors = {}
    for (kind, microbatch), rows in handed_rows(program, plan_rank(program, rank)).items():
        module = program.layout.modules[0 if kind is Pass.FORWARD else 1]
        replica = int(np.argwhere(module.ranks == rank)[0, 0])
        generator = torch.Generator().manual_seed(100 * replica + 10 * microbatch + kind)
        tensor = torch.randn(int(rows.sum()), MODEL.llm.config.hidden_size, generator=generator)
        if with_sizes:
            tensor._mimo_bridge_split_sizes = rows.tolist()
        tensors[kind, microbatch] = tensor
    return tensors


def compare(rank: int, cases: list[tuple[str, bool, bool]]) -> list[tuple[int, int]]:
    """How many tensors a rank got, and how many of them differ, by case: layout, uneven, rows reversed."""
    prepare_platform((*MODULES, *BRIDGE_MODULES))
    found = []
    for name, uneven, backwards in cases:
        program = program_of(LAYOUTS[name], uneven)
        ours = Messages(program)
        bridge = (ColocatedBridge if name.startswith("colocated") else Bridge)(program.layout)
        if backwards:
            ours.plan = reverse_rows(program, rank)
        tensors = handed(program, rank)
        got, wanted = ours.exchange(tensors), bridge.exchange(tensors)
        assert got.keys() == wanted.keys()
        found.append((len(wanted), sum(not torch.equal(got[key], wanted[key]) for key in wanted)))
    return found


@pytest.mark.wide
def test_messages_deliver_what_bridges_deliver() -> None:
    faults = [("fan_in_wider_llm", True, True), ("colocated_fan_in", False, True)]
    check_delivery([name for name in LAYOUTS if name not in WIDE], faults, RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(WIDE))
def test_messages_deliver_what_bridges_deliver_to_eight_ranks(name: str) -> None:
    check_delivery([name], [(name, False, True)], 2 * RANKS)


def check_delivery(names: list[str], faults: list[tuple[str, bool, bool]], num_ranks: int) -> None:
    """Assert that nothing differs from the bridges, and everything where rows are reversed."""
    uneven = [(name, True, False) for name in names if not name.startswith("colocated")]
    right = [*((name, False, False) for name in names), *uneven]
    for rank, found in enumerate(run_ranks(compare, num_ranks, [*right, *faults])):
        for (name, *_), (count, different) in zip(right, found, strict=False):
            passes = 2 if name.startswith("colocated") else 1
            assert (count, different) == (passes * NUM_MICROBATCHES, 0), (rank, name)
        for count, different in found[len(right) :]:
            assert different == count, rank


def unequal_shares(rank: int) -> list[int]:
    """Rows that a rank sends forward less those of the gradient it gets, where no one tells the bridge the sizes."""
    prepare_platform((*MODULES, *BRIDGE_MODULES))
    program = program_of(LAYOUTS["fan_in_wider_llm"], uneven=True)
    tensors = handed(program, rank, with_sizes=False)
    got = Bridge(program.layout).exchange(tensors)
    return [len(tensors[Pass.FORWARD, m]) - len(got[Pass.BACKWARD, m]) for kind, m in got if kind is Pass.BACKWARD]


def test_a_bridge_alone_splits_gradients_into_equal_shares() -> None:
    first, second, *_ = run_ranks(unequal_shares, RANKS)
    assert any(first)
    assert first == [-difference for difference in second]


def test_grids_hold_consecutive_ranks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "10")
    blocks = [[2, 3], [4, 5], [6, 7], [8, 9]]
    assert grid_of(placed(VISION, [blocks[:2], blocks[2:]], tp=2)).get_rank_enum("tp") == blocks
    with pytest.raises(ValueError, match="vision: no grid of consecutive ranks"):
        grid_of(placed(VISION, [blocks[0:3:2], blocks[1::2]], tp=2))
