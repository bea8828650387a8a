"""Prices, transfers and noise of programs worked by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from entrain_bench.balancing.profile import create_profile
from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.base.arrays import FloatArray, rows_of
from entrain_bench.costs.edges import held_s, moved_s
from entrain_bench.costs.memory import Memory
from entrain_bench.costs.truth import ActionNoise, CostTruth, SlowRank
from entrain_bench.program import ActionView, Pass, Program, Slots, build_program
from entrain_bench.program.assignment import ModuleAssignment, group_chunks
from entrain_bench.program.layout import Layout, are_grids
from entrain_bench.simulate import Simulator
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.job import Degrees
from entrain_bench_strategies.hetero import BatchSlices, ColocatedScheduler
from support.builders import (
    ListSource,
    chain_layout,
    find,
    placed,
    samples,
    tiny_cluster,
    tiny_job,
    tiny_model,
    two_ranks,
    uniform_batch,
)
from support.hetero import MODEL as SMALL
from support.hetero import pair_layout, profile_for

# 1e9 bytes/s of memory; pairs at 1e9 bytes/s and 1e-6 s, nodes at 5e8 and 2e-6, the network at 1e8 and 1e-5.
CLUSTER = tiny_cluster(num_nodes=2, gpus_per_node=8)
MODEL = tiny_model()
VISION, LLM = MODEL.modules


# Passes


# Transfers


def one_sample(encoder: Any, llm: Any) -> Program:
    layout = Layout(
        (placed(VISION, encoder, tp=np.shape(encoder)[2]), placed(LLM, llm, tp=np.shape(llm)[2])), num_microbatches=1
    )
    shapes = samples((10, [40]))
    zero = np.zeros(1, np.int64)
    chunks = [group_chunks(m, shapes, ModuleAssignment(zero.copy(), zero.copy())) for m in MODEL.modules]
    slots = [Slots(np.zeros((1, m.pp), np.int64), np.ones((1, m.pp), np.int64)) for m in layout.modules]
    return build_program(MODEL, layout, shapes, chunks, slots)


def handover(encoder: Any, llm: Any) -> tuple[float, float]:
    """Delay from encoder to LLM in forward, and back."""
    program = one_sample(encoder, llm)
    delay = CostTruth(MODEL, CLUSTER).price(program).delay_s
    ahead = find(program, "llm", Pass.FORWARD, 0, [0])
    back = find(program, "vision", Pass.BACKWARD, len(encoder[0]) - 1, [0])
    (first,) = range(program.dep_offsets[ahead], program.dep_offsets[ahead + 1])
    (second,) = range(program.dep_offsets[back], program.dep_offsets[back + 1])
    return float(delay[first]), float(delay[second])


# 40 encoder tokens become 10 LLM tokens of 128 x 2 bytes.
BYTES = 2560


@pytest.mark.parametrize(
    ("encoder", "llm", "ahead", "back"),
    [
        ([[[4, 5]]], [[[4, 5]]], 0.0, 0.0),
        ([[[0]]], [[[1]]], 1e-6 + BYTES / 1e9, 1e-6 + BYTES / 1e9),
        # two ranks send to two
        ([[[0, 1]]], [[[2, 3]]], 2e-6 + BYTES / 2 / 5e8, 2e-6 + BYTES / 2 / 5e8),
        # one rank to two: one link, then the pair gathers the halves; back, nothing to gather on one rank
        ([[[0]]], [[[2, 3]]], 2e-6 + BYTES / 5e8 + 1e-6 + BYTES / 2 / 1e9, 2e-6 + BYTES / 5e8),
        ([[[2, 3]]], [[[0]]], 2e-6 + BYTES / 5e8, 2e-6 + BYTES / 5e8 + 1e-6 + BYTES / 2 / 1e9),
    ],
)
def test_handover_by_hand(encoder: Any, llm: Any, ahead: float, back: float) -> None:
    assert handover(encoder, llm) == pytest.approx((ahead, back), rel=1e-12, abs=0.0)


def of_travelling(program: Program, link_s: float, fixed_s: float) -> tuple[FloatArray, FloatArray]:
    travels = program.dep_bytes > 0
    return np.where(travels, link_s, 0.0), np.where(travels, fixed_s, 0.0)


def held_by(program: Program, hold_s: FloatArray) -> dict[str, float]:
    """Holds of lanes after each pass, by a short name."""

    def name(view: ActionView) -> str:
        return f"{view.module} {'FB'[int(view.kind)]}{view.microbatch}"

    passes = [program.view(int(action)) for action in np.flatnonzero(program.chunk >= 0)]
    return {name(view): float(hold_s[view.index]) for view in passes}


def test_a_lane_is_held_for_what_it_sends_or_what_its_next_action_receives() -> None:
    # Encoder: F0 F1 B0 B1 (what fills a pipeline of two); LLM: F0 B0 F1 B1. Every transfer takes 3 + 1 s.
    program = two_ranks(SMALL, 2)
    hold = held_by(program, held_s(program, *moved_s(program, *of_travelling(program, 3.0, 1.0))))
    assert hold == {
        "vision F0": 4.0,
        "vision F1": 4.0,
        "vision B0": 4.0,  # receives for B1
        "vision B1": 0.0,
        "llm F0": 0.0,  # what B0 needs is there
        "llm B0": 4.0,  # sends, and receives for F1 at the same time
        "llm F1": 0.0,
        "llm B1": 4.0,
    }


# tiny_cluster: pairs 1e9 bytes/s, 1 us; a node of 8 at 5e8 bytes/s, 2 us. An item of 40 tokens hands 10 to an LLM of
# hidden size 128 in bf16: 2560 bytes.
NODE = tiny_cluster(1, 8)
ITEM_BYTES = 10 * 128 * 2


def program_of(layout: Layout, count: int, microbatch_size: int = 1) -> Program:
    profile, shapes = profile_for(microbatch_size), samples(*[(10, [40])] * count)
    assignment = BatchSlices().assign(shapes, layout, profile)
    return ColocatedScheduler().schedule(shapes, layout, assignment, profile)


def delays(program: Program, kind: Pass) -> FloatArray:
    """Delays between the modules that inputs of that pass wait for."""
    source, target = program.dep_actions, rows_of(program.dep_offsets)
    crossing = (program.module[source] != program.module[target]) & (program.kind[target] == kind)
    return CostTruth(SMALL, NODE).price(program).delay_s[crossing]


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


def program(num_microbatches: int = 4, first_sample: int = 0) -> Program:
    """Two replicas of two stages each."""
    shapes, assignment = uniform_batch(SMALL, num_microbatches, dp=2)
    shapes = replace(shapes, sample_ids=shapes.sample_ids + first_sample)
    layout = chain_layout(SMALL, 2, 2, num_microbatches, dp=2)
    return chain_program(SMALL, shapes, layout, assignment, stages_behind(layout))


def test_factors_have_the_stated_spread_and_steps_have_none() -> None:
    made = program(num_microbatches=256)
    factors = ActionNoise(0.1, seed=3).factors(made)
    passes = factors[made.chunk >= 0]
    assert passes.mean() == pytest.approx(1.0, abs=0.01)
    assert passes.std() == pytest.approx(0.1, rel=0.03)
    assert (passes.min(), passes.max()) == pytest.approx((1 - 0.1 * 3**0.5, 1 + 0.1 * 3**0.5), abs=0.001)
    assert len(np.unique(passes)) == len(passes)
    assert set(factors[made.chunk < 0]) == {1.0}
    # Neighbours have nothing to do with each other.
    assert abs(np.corrcoef(passes[1:], passes[:-1])[0, 1]) < 0.05
    assert ActionNoise(0.5).factors(made).min() > 0


def test_noise_is_charged_and_no_strategy_sees_it() -> None:
    made, job = program(), tiny_job(SMALL)
    exact, noisy = (CostTruth(SMALL, tiny_cluster(), noise=ActionNoise(std, seed=3)) for std in (0.0, 0.2))
    charged = noisy.charge(made)
    np.testing.assert_allclose(charged.duration_s, exact.price(made).duration_s * noisy.noise.factors(made), rtol=1e-15)
    assert np.all(charged.comm_s <= charged.duration_s)
    times = [Simulator(truth, 1e12).execute(made).iteration_time_s for truth in (exact, noisy)]
    assert times[0] != times[1]
    trials = {create_profile(job, truth, ListSource(made.shapes), 0).trial_s(made) for truth in (exact, noisy)}
    assert trials == {times[0]}


WHOLE_SEQUENCES = FrameworkOptions(encoder_cp=False)


def test_it_keeps_their_activations_and_a_share_of_the_states() -> None:
    split, whole = Memory(MODEL), Memory(MODEL, WHOLE_SEQUENCES)
    place = placed(VISION, [[[0, 1, 2, 3]]], cp=4)
    for less, more in zip(split.token_bytes(VISION, place), whole.token_bytes(VISION, place), strict=True):
        assert more == pytest.approx(4 * less, rel=1e-12)
    # Ranks of a context-parallel group hold the same weights in both: 2 + 4 bytes, and 12 shared out among four.
    assert whole.stage_state_bytes(VISION, place) == pytest.approx([VISION.parameters * (6 + 12 / 4)], rel=1e-12)
    assert whole.token_bytes(LLM, place) == split.token_bytes(LLM, placed(LLM, [[[0, 1, 2, 3]]], cp=4))


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


def test_the_slowest_rank_of_a_group_decides() -> None:
    """The greatest of n uniform draws has mean n / (n + 1); the first rank draws what it would alone."""
    shapes, assignment = uniform_batch(SMALL, 256)
    factors = {}
    for width in (1, 4):
        placed_on = [placed(module, np.arange(width).reshape(1, 1, width), tp=width) for module in SMALL.modules]
        layout = Layout(tuple(placed_on), 256)
        made = chain_program(SMALL, shapes, layout, assignment, stages_behind(layout))
        factors[width] = ActionNoise(0.1, seed=3).factors(made)[made.chunk >= 0]
    low, high = 1 - 0.1 * 3**0.5, 1 + 0.1 * 3**0.5
    assert np.all(factors[4] >= factors[1])
    assert factors[4].max() <= high
    assert np.mean(factors[4] == factors[1]) == pytest.approx(1 / 4, abs=0.05)
    assert factors[4].mean() == pytest.approx(low + (high - low) * 4 / 5, abs=0.005)


def test_a_slow_rank_slows_the_computation_of_its_block_alone() -> None:
    made = program()
    even = CostTruth(SMALL, tiny_cluster())
    rank = 2  # The first LLM stage of replica 0 is on ranks 2 and 3, one a stage.
    slow = replace(even, slow_rank=SlowRank(rank, 1.5)).charge(made)
    prices = even.price(made)
    here = np.zeros(made.num_actions, bool)
    here[made.lane_actions[made.lane_offsets[rank] : made.lane_offsets[rank + 1]]] = True
    here &= made.chunk >= 0
    expected = prices.duration_s + 0.5 * here * (prices.duration_s - prices.comm_s)
    assert 0 < here.sum() < len(here)
    np.testing.assert_allclose(slow.duration_s, expected, rtol=1e-15)
    assert slow.comm_s.tolist() == prices.comm_s.tolist()
