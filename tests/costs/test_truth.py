"""Prices, transfers and noise of programs worked by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from entrain_bench.balancing.profile import create_profile
from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.base.arrays import FloatArray, rows_of
from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import compose
from entrain_bench.costs.edges import colocated_transforms, derive_edges, held_s, moved_s
from entrain_bench.costs.memory import Memory
from entrain_bench.costs.truth import ActionNoise, CostTruth
from entrain_bench.program import ActionView, Pass, Program, Slots, build_program
from entrain_bench.program.assignment import ModuleAssignment, group_chunks, same_microbatches
from entrain_bench.program.layout import Layout, are_grids
from entrain_bench.run.experiment import prepare
from entrain_bench.simulate import Simulator, place_actions
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.job import Degrees
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench_strategies.hetero import BatchSlices, ColocatedScheduler
from support.builders import (
    TOKENS,
    ListSource,
    as_ints,
    chain_layout,
    durations,
    encoder_config,
    find,
    llm_config,
    no_delay,
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


@pytest.mark.parametrize("split", [False, True])
def test_prices_put_steps_and_passes_where_they_belong(split: bool) -> None:
    layout = chain_layout(MODEL, 1, 2, 4, dp=2)
    shapes, assignment = uniform_batch(MODEL, 4, dp=2)
    behind = stages_behind(layout)
    program = chain_program(MODEL, shapes, layout, assignment, behind, weight_delay=behind if split else None)
    truth = CostTruth(MODEL, CLUSTER, FrameworkOptions(overlap_grad_reduce=False, overlap_param_gather=False))
    prices, costs = truth.price(program), truth.step_costs
    for action in range(program.num_actions):
        view = program.view(action)
        module, place = MODEL.module(view.module), layout.module(view.module)
        expected = 0.0
        if view.kind is Pass.GRAD_SYNC:
            comm = costs.sync_s(module, place)[view.stage]
        elif view.kind is Pass.OPTIMIZER:
            comm = costs.gather_s(module, place)[view.stage]
        else:
            times = truth.unit_times(module, place, module.lengths(shapes, np.array(view.members)), split)
            name = view.kind.name.lower()
            comm = 0.0 if view.kind is Pass.WEIGHT else getattr(times, f"{name}_comm_s")[0, view.stage]
            expected = getattr(times, f"{name}_s")[0, view.stage] + comm
        assert prices.duration_s[action] == pytest.approx(expected, rel=1e-12), str(view)
        assert prices.comm_s[action] == pytest.approx(comm, rel=1e-12), str(view)
    assert prices.comm_s[~program.is_pass].all()
    steps = ~program.is_pass
    assert not CostTruth(MODEL, CLUSTER).price(program).comm_s[steps].any()


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
        ([[[0]]], [[[0]]], 0.0, 0.0),
        ([[[4, 5]]], [[[4, 5]]], 0.0, 0.0),
        ([[[0]]], [[[1]]], 1e-6 + BYTES / 1e9, 1e-6 + BYTES / 1e9),
        ([[[1]]], [[[2]]], 2e-6 + BYTES / 5e8, 2e-6 + BYTES / 5e8),
        ([[[0]]], [[[8]]], 1e-5 + BYTES / 1e8, 1e-5 + BYTES / 1e8),
        # two ranks send to two
        ([[[0, 1]]], [[[2, 3]]], 2e-6 + BYTES / 2 / 5e8, 2e-6 + BYTES / 2 / 5e8),
        # one rank to two: one link, then the pair gathers the halves; back, nothing to gather on one rank
        ([[[0]]], [[[2, 3]]], 2e-6 + BYTES / 5e8 + 1e-6 + BYTES / 2 / 1e9, 2e-6 + BYTES / 5e8),
        ([[[2, 3]]], [[[0]]], 2e-6 + BYTES / 5e8, 2e-6 + BYTES / 5e8 + 1e-6 + BYTES / 2 / 1e9),
        # colocated on some of the same ranks is still a transfer
        ([[[0]]], [[[0, 1]]], 1e-6 + BYTES / 1e9 + 1e-6 + BYTES / 2 / 1e9, 1e-6 + BYTES / 1e9),
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


def test_links_add_up_and_latencies_go_by_together() -> None:
    # Encoder microbatches of three replicas feed one LLM microbatch, after another one that is there already.
    layout = Layout((placed(VISION, [[[0]], [[1]], [[2]]]), placed(LLM, [[[3]]])), 2)
    shapes = samples((10, []), (10, [40]), (10, [40]), (10, [40]))
    microbatch, zero = as_ints([0, 1, 1, 1]), np.zeros(4, np.int64)
    assignment = same_microbatches(SMALL, shapes, zero, microbatch, microbatch, encoder_replica=as_ints([0, 0, 1, 2]))
    program = chain_program(SMALL, shapes, layout, assignment, [as_ints([9]), as_ints([0])])
    link_s, fixed_s = of_travelling(program, 3.0, 0.0)
    into = rows_of(program.dep_offsets) == find(program, "llm", Pass.FORWARD, 0, [1, 2, 3])
    fixed_s[into & (link_s > 0)] = [1.0, 5.0, 2.0]
    hold = held_s(program, *moved_s(program, link_s, fixed_s))
    assert hold[find(program, "llm", Pass.BACKWARD, 0, [0])] == 3 * 3.0 + 5.0
    assert hold[find(program, "vision", Pass.FORWARD, 0, [0], replica=0)] == 3.0 + 1.0
    assert hold[find(program, "llm", Pass.BACKWARD, 0, [1, 2, 3])] == 9.0


def test_a_held_lane_starts_later_and_waits_for_transfers() -> None:
    program = two_ranks(SMALL, 2)
    link_s, fixed_s = of_travelling(program, 3.0, 1.0)
    hold = held_s(program, *moved_s(program, link_s, fixed_s))
    took = durations(program, lambda _: 10.0)
    start, end, wait = place_actions(program, took, link_s + fixed_s, hold_s=hold)
    # encoder F0 0-10, held to 14, F1 14-24; LLM F0 14-24, B0 24-34, held to 38; F1 38-48 (its data are there at 28).
    assert start[find(program, "vision", Pass.FORWARD, 0, [1])] == 14.0
    assert wait[find(program, "vision", Pass.FORWARD, 0, [1])] == 4.0
    first, second = (find(program, "llm", Pass.FORWARD, 0, [k]) for k in (0, 1))
    assert start[[first, second]].tolist() == [14.0, 38.0]
    assert wait[[first, second]].tolist() == [4.0, 4.0]
    assert end.max() == 10.0 + max(start[program.chunk >= 0])
    free, _, _ = place_actions(program, took, no_delay(program))
    assert free[second] == 30.0


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


def test_a_generator_behind_the_llm_takes_no_part() -> None:
    # Two encoder replicas feed the LLM on the same two ranks; a generator is on a third, or on the same two as well.
    modules = {"vision": encoder_config(), "llm": llm_config(), "out": encoder_config(role="generator", item_tokens=8)}
    model = ModelSpec.from_config({"name": "handmade", "modules": modules, "tokens": TOKENS})
    vision, llm, out = model.modules
    shapes, zero = samples((10, [40]), (10, [40])), np.zeros(2, np.int64)
    for ranks in ([[[2]]], [[[0]], [[1]]]):
        layout = Layout((placed(vision, [[[0]], [[1]]]), placed(llm, [[[0, 1]]], tp=2), placed(out, ranks)), 1)
        assignment = same_microbatches(model, shapes, zero, zero, zero, encoder_replica=np.arange(2))
        program = chain_program(model, shapes, layout, assignment, [np.zeros(1, np.int64)] * 3)
        found, seconds = colocated_transforms(program, NODE)
        target = program.module[rows_of(program.dep_offsets)[found]]
        source = program.module[program.dep_actions[found]]
        assert sorted(zip(source.tolist(), target.tolist(), strict=True)) == [(0, 1), (0, 1), (1, 0), (1, 0)]
        # An all-gather of both items' halves over the pair, and a slice back.
        assert sorted(seconds) == pytest.approx([0.0, 0.0, *[1e-6 + 2 * ITEM_BYTES / 2 / 1e9] * 2], rel=1e-12)


TINY = ("model=tiny", "cluster=tiny", "global_batch=64", "microbatch_size=2", "layout.tp=1", "layout.dp=2")


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


def test_a_run_takes_its_noise_from_its_seed_and_plans_as_without() -> None:
    def planned(*overrides: str) -> tuple[Layout, SampleShapes, float]:
        setting = prepare(compose(*TINY, *overrides))
        layout, shapes = setting.strategy.plan(setting.profile), setting.source.batch(0, 64, 0)
        made = setting.strategy.program(shapes, layout, setting.profile)
        return layout, shapes, setting.executor.execute(made).iteration_time_s  # type: ignore[union-attr]

    plain, noisy = planned(), planned("action_noise=0.1")
    assert plain[0].describe() == noisy[0].describe()
    assert plain[2] != noisy[2]
    assert noisy[2] == planned("action_noise=0.1")[2]
    with pytest.raises(UserError, match=r"action_noise=0.1: must be 0 with harness=train"):
        prepare(compose(*TINY, "harness=train", "action_noise=0.1"))


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
