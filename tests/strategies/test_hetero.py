"""Heterogeneous parallelism: pairs of degrees, slices and routes, and schedules by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.candidates import rising_candidates
from entrain_bench.balancing.interface import Scheduler
from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.program import Pass
from entrain_bench.program.assignment import Assignment, ModuleAssignment, same_microbatches
from entrain_bench.program.layout import Layout, find_ratio
from entrain_bench.program.validate import check_program
from entrain_bench.simulate import place_actions
from entrain_bench.specs.job import Degrees, LayoutRequest
from entrain_bench_strategies.hetero import (
    BatchSlices,
    ColocatedScheduler,
    GraphAwareScheduler,
    Pair,
    average_layer_s,
    draft_pairs,
    estimate_s,
    island_sizes,
    list_pairs,
    slice_rows,
)
from entrain_bench_strategies.mdp import DecoupledScheduler
from support.builders import (
    durations,
    no_delay,
    passes,
    placed,
    profile_of,
    random_samples,
    samples,
    tiny_cluster,
    tiny_job,
)
from support.hetero import MODEL, ROW, pair_layout, profile_for, program_of

F = Pass.FORWARD


def brute_force(num_ranks: int, colocated: bool, sizes: tuple[int, ...]) -> set[tuple[int, ...]]:
    """(encoder TP, PP, DP, LLM TP, PP, DP) of batch 8 in microbatches of 1, CP 1: 4 heads and 4 layers each."""
    found: set[tuple[int, ...]] = set()
    span = range(1, num_ranks + 1)
    for et, ep, ed, lt, lp, ld in product(span, span, span, span, span, span):
        if any(t not in (1, 2, 4) for t in (et, lt)) or max(ep, lp) > 4 or 8 % ld or (ed % ld and ld % ed):
            continue
        encoder, llm = et * ep * ed, lt * lp * ld
        together = encoder == llm == num_ranks and ep == 1
        apart = encoder in sizes and encoder + llm == num_ranks
        if together if colocated else apart:
            found.add((et, ep, ed, lt, lp, ld))
    return found


@pytest.mark.parametrize("gpus", [1, 2, 4])
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_search_is_exhaustive(nodes: int, gpus: int) -> None:
    cluster = tiny_cluster(nodes, gpus)
    job = tiny_job(MODEL, cluster, global_batch=8, microbatch_size=1, request=LayoutRequest(cp=1))

    def keys(pairs: list[Pair]) -> list[tuple[int, ...]]:
        return [(p.encoder.tp, p.encoder.pp, p.encoder.dp, p.llm.tp, p.llm.pp, p.llm.dp) for p in pairs]

    expected = {key for key in brute_force(nodes * gpus, True, ()) if max(key[0], key[3]) <= gpus}
    together = keys(list_pairs(job, colocated=True))
    assert len(together) == len(expected)
    assert set(together) == expected
    sizes = tuple(island_sizes(job))
    if nodes * gpus == 1:
        assert sizes == ()
        with pytest.raises(UserError, match="use the 1 ranks"):
            list_pairs(job, colocated=False)
        return
    expected = {key for key in brute_force(nodes * gpus, False, sizes) if max(key[0], key[3]) <= gpus}
    apart = keys(list_pairs(job, colocated=False))
    assert len(apart) == len(expected) > 0
    assert set(apart) == expected
    assert set(keys(list_pairs(job, colocated=False, encoder_ranks=sizes[-1]))) == {
        key for key in expected if key[0] * key[1] * key[2] == sizes[-1]
    }


def test_requests_bind_the_llm() -> None:
    job = tiny_job(MODEL, tiny_cluster(2, 4), request=LayoutRequest(tp=2, cp=1, dp=2))
    pairs = list_pairs(job, colocated=True)
    assert {(p.llm.tp, p.llm.pp, p.llm.dp) for p in pairs} == {(2, 2, 2)}
    assert {(p.encoder.tp, p.encoder.dp) for p in pairs} == {(1, 8), (2, 4), (4, 2)}
    whole = replace(job, request=LayoutRequest(tp=2, cp=1, dp=2, pp=2))
    # A chain of two stages leaves one stage to the LLM: 4 ranks, and 4 to the encoder.
    assert {(p.encoder.pp, p.llm.pp, p.llm.dp) for p in list_pairs(whole, colocated=False)} == {(1, 1, 2)}
    for request in (LayoutRequest(tp=3), LayoutRequest(tp=2, dp=2, pp=3), LayoutRequest(dp=3)):
        with pytest.raises(UserError, match=r"layout\.|dividing"):
            list_pairs(replace(job, request=request), colocated=True)


def test_estimates_by_hand() -> None:
    encoder, llm = np.array([2.0]), np.array([3.0, 5.0])
    assert estimate_s(encoder, llm, 4, colocated=True) == 2 + 8 + 3 * 5
    assert estimate_s(encoder, llm[:1], 4, colocated=True) == 4 * (2 + 3)
    assert estimate_s(np.array([7.0]), llm, 4, colocated=False) == 15 + 3 * 7


# Estimates and plans


@pytest.mark.parametrize("colocated", [False, True])
def test_candidates_take_their_stages_the_step_and_the_offload(colocated: bool) -> None:
    profile, shapes = profile_for(), samples(ROW)
    llm = Degrees(tp=1, cp=1, pp=2, dp=2)
    encoder = Degrees(tp=1, cp=1, pp=1, dp=8) if colocated else Degrees(tp=1, cp=1, pp=2, dp=2)
    vision, language = MODEL.modules
    # 16 microbatches of one sample; eight colocated replicas share those of two at once, for the whole window.
    share = 2 / 8 * 16 if colocated else 1
    layers = average_layer_s(profile, vision, shapes, share, 1, 1), average_layer_s(profile, language, shapes, 1, 1, 1)
    seen = set()
    drafts = draft_pairs(profile, shapes, [Pair(encoder, llm)], colocated=colocated, offload=True)
    for candidate in rising_candidates(drafts):
        vision_at, language_at = candidate.layout.modules
        stages = [
            np.array([each[:cut].sum(), each[cut:].sum()][: at.pp]) * (4 / 3 if at.recompute else 1)
            for each, at in zip(layers, candidate.layout.modules, strict=True)
            for cut in [at.layers_per_stage[0]]
        ]
        seconds = estimate_s(stages[0], stages[1], 16, colocated=colocated) + profile.programs.step_s(candidate.layout)
        # The encoder's weights leave and return over a host link of 1e8 bytes/s.
        away = 2 * 2 * vision.parameters / 1e8 if vision_at.offload else 0.0
        assert candidate.estimated_s == pytest.approx(seconds + away, rel=1e-12)
        assert not language_at.offload
        seen.add((vision_at.recompute, language_at.recompute, vision_at.offload))
    assert seen == set(product([False, True], [False, True], [False, True] if colocated else [False]))


def test_the_fullest_slice_is_measured() -> None:
    profile, shapes = profile_for(), samples((10, [100, 300]), (20, [200]))
    vision = MODEL.modules[0]
    # 1.5 items a sample: 1.5 samples hold 2.25 items, the fullest slice 3 of 200 tokens.
    expected = [float(profile.layers.measure(vision, np.full(3, 200), 2, 1)[k].total_s[0]) for k in vision.layer_kind]
    assert average_layer_s(profile, vision, shapes, 1.5, 2, 1).tolist() == pytest.approx(expected, rel=1e-12)
    assert average_layer_s(profile, vision, samples((10, [])), 1.5, 2, 1).tolist() == [0.0] * 4


def test_context_parallelism_of_the_llm_is_searched_beyond_a_node_and_the_encoders_is_1() -> None:
    job = tiny_job(MODEL, tiny_cluster(2, 4), global_batch=8, microbatch_size=1)
    for pairs in (list_pairs(job, colocated=True), list_pairs(job, colocated=False, encoder_ranks=4)):
        assert {pair.encoder.cp for pair in pairs} == {1}
        assert {pair.llm.cp for pair in pairs} >= {1, 2, 4}
    assert max(pair.llm.tp * pair.llm.cp for pair in list_pairs(job, colocated=True)) == 8


def feeds(assignment: Assignment) -> set[tuple[int, int]]:
    """Which encoder replica feeds which LLM replica, for samples of one item each."""
    vision, llm = assignment.modules
    return set(zip(vision.replica.tolist(), llm.replica.tolist(), strict=True))


def test_fan_in_joins_neighbours_on_the_llm_replicas_ranks() -> None:
    # arXiv:2605.27678, section 1: encoder TP2 DP4 -> LLM TP4 DP2 gathers over the ranks {0,2}, {1,3}, {4,6}, {5,7}.
    layout = pair_layout(Degrees(2, 1, 1, 4), Degrees(4, 1, 1, 2), colocated=True)
    vision, llm = layout.modules
    assignment = BatchSlices().assign(samples(*[(10, [40])] * 8), layout, profile_for(microbatch_size=2))
    found = feeds(assignment)
    assert found == {(0, 0), (1, 0), (2, 1), (3, 1)}
    gathers = []
    for target in range(llm.dp):
        sources = sorted(u for u, v in found if v == target)
        assert np.union1d(vision.ranks[sources[0]], vision.ranks[sources[1]]).tolist() == llm.ranks[target, 0].tolist()
        gathers += [{int(vision.ranks[u, 0, lane]) for u in sources} for lane in range(vision.tp)]
    assert gathers == [{0, 2}, {1, 3}, {4, 6}, {5, 7}]
    # Microbatches of 2 go round: replica 0 has samples 0 1 | 4 5, of which encoder replica 0 takes the first of each.
    assert assignment.modules[0].replica.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert assignment.modules[0].microbatch.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_fan_out_slices_one_encoder_replica_among_neighbours() -> None:
    layout = pair_layout(Degrees(4, 1, 1, 2), Degrees(2, 1, 1, 4), colocated=True)
    assert (find_ratio(*layout.modules).fan_in, find_ratio(*layout.modules).fan_out) == (1, 2)
    assignment = BatchSlices().assign(samples(*[(10, [40])] * 8), layout, profile_for())
    assert feeds(assignment) == {(0, 0), (0, 1), (1, 2), (1, 3)}
    program = program_of(layout, 8)
    # An encoder action holds the lanes of both its LLM replicas; one microbatch of it serves both.
    assert program.num_lanes[program.forward_actions(0)].ravel().tolist() == [2] * 4
    assert program.num_lanes[program.forward_actions(1)].ravel().tolist() == [1] * 8
    start, _, _ = place_actions(program, np.ones(program.num_actions), no_delay(program))
    assert start[program.forward_actions(0)].ravel().tolist() == [0, 4, 0, 4]
    assert start[program.forward_actions(1)].ravel().tolist() == [1, 5] * 4


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=60), st.integers(1, 7))
def test_slices_are_contiguous_and_even(rows: list[int], count: int) -> None:
    row = np.array(rows, np.int64)
    cut = slice_rows(row, count)
    for value in set(rows):
        mine = cut[row == value]
        assert np.all(np.diff(mine) >= 0)
        sizes = np.bincount(mine, minlength=count)
        assert len(sizes) == count
        assert sizes.max() - sizes.min() <= 1


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.integers(1, 3))
def test_any_integer_ratio_runs_colocated_and_apart(seed: int, encoder_dp: int, llm_dp: int, chunks: int) -> None:
    shapes = random_samples(np.random.default_rng(seed), 32)
    profile = profile_of(tiny_job(MODEL, tiny_cluster(2, 8)), shapes)
    for pp, colocated in product((1, 2), (True, False)):
        ranks = max(encoder_dp, llm_dp * pp)
        grids = [np.arange(ranks).reshape(encoder_dp, 1, -1), np.arange(llm_dp * pp).reshape(llm_dp, pp, 1)]
        if colocated:
            grids[1] = np.arange(ranks).reshape(llm_dp, pp, -1)
            if (ranks // encoder_dp) * encoder_dp != ranks or ranks % (llm_dp * pp):
                continue
        else:
            grids[1] = grids[1] + ranks
        modules = [placed(m, g, tp=g.shape[2]) for m, g in zip(MODEL.modules, grids, strict=True)]
        layout = Layout(tuple(modules), 32)
        assignment = BatchSlices(chunks).assign(shapes, layout, profile)
        scheduler = ColocatedScheduler() if colocated else GraphAwareScheduler()
        program = scheduler.schedule(shapes, layout, assignment, profile)
        check_program(program)
        _, end, _ = place_actions(program, np.ones(program.num_actions), no_delay(program))
        assert np.all(np.isfinite(end))


# Planted faults


@pytest.mark.parametrize("scheduler", [ColocatedScheduler(), GraphAwareScheduler()])
def test_a_wrong_route_with_valid_shapes_is_refused(scheduler: Scheduler) -> None:
    colocated = not isinstance(scheduler, GraphAwareScheduler)
    llm = Degrees(4, 1, 1, 2) if colocated else Degrees(2, 1, 1, 2)
    encoder = Degrees(2, 1, 1, 4) if colocated else Degrees(1, 1, 1, 4)
    layout = pair_layout(encoder, llm, colocated=colocated)
    profile, shapes = profile_for(microbatch_size=2), samples(*[(10, [40])] * 8)
    right = BatchSlices().assign(shapes, layout, profile)
    scheduler.schedule(shapes, layout, right, profile)
    vision = right.modules[0]
    # The interleaved mapping {0, 2}, {1, 3} of replicas: same sizes, other ranks.
    wrong = ModuleAssignment(np.array([0, 2, 1, 3])[vision.replica], vision.microbatch)
    with pytest.raises(
        IncompatibleError, match=r"sample 1 is encoded by replica 2 of 4 of vision, which does not feed"
    ):
        scheduler.schedule(shapes, layout, Assignment((wrong, right.modules[1])), profile)


def test_each_schedule_refuses_the_other_placement() -> None:
    shapes = samples(*[(10, [40])] * 2)
    zero = np.zeros(2, np.int64)
    assignment = same_microbatches(MODEL, shapes, zero, np.arange(2), np.arange(2))
    vision, llm = MODEL.modules
    apart = Layout((placed(vision, [[[0]]]), placed(llm, [[[1]]])), 2)
    first_stage = Layout((placed(vision, [[[0]]]), placed(llm, [[[0], [1]]])), 2)
    for layout, scheduler in product((apart, first_stage), (ColocatedScheduler(), DecoupledScheduler())):
        with pytest.raises(IncompatibleError, match="the same ranks"):
            scheduler.schedule(shapes, layout, assignment, profile_for())
    with pytest.raises(IncompatibleError, match="on different ranks"):
        GraphAwareScheduler().schedule(shapes, first_stage, assignment, profile_for())


def test_one_llm_stage_runs_microbatches_in_turn_on_lanes_of_both_grids() -> None:
    program = program_of(pair_layout(Degrees(2, 1, 1, 4), Degrees(4, 1, 1, 2), colocated=True), 8, microbatch_size=2)
    for lane in range(4):
        assert passes(program, lane) == [
            *("vision F0", "llm F0", "llm B0", "vision B0"),
            *("vision F1", "llm F1", "llm B1", "vision B1"),
        ]
    assert program.num_lanes[program.forward_actions(0)].ravel().tolist() == [1] * 8
    assert program.num_lanes[program.forward_actions(1)].ravel().tolist() == [2] * 4

    def seconds(member: int, kind: Pass, module: str) -> float:
        # Sample 1 is slow in the encoder; the LLM waits for both its lanes.
        return (5.0 if member == 1 else 1.0) if (module, kind) == ("vision", F) else 2.0

    took = durations(program, lambda view: seconds(view.members[0], view.kind, view.module))
    start, _, _ = place_actions(program, took, no_delay(program))
    # lane 0: V0 . . . . L0 L0 l0 l0 v0 v0 V0 | lane 1 the same, its first V0 lasts 5
    assert start[program.forward_actions(0)].ravel().tolist() == [0, 11, 0, 11, 0, 7, 0, 7]
    assert start[program.forward_actions(1)].ravel().tolist() == [5, 12, 1, 8]
    assert start[program.backward_actions(1)].ravel().tolist() == [7, 14, 3, 10]
    assert start[program.backward_actions(0)].ravel().tolist() == [9, 16, 9, 16, 5, 12, 5, 12]


def test_three_phases_with_fan_in_by_hand() -> None:
    # Encoder TP1 DP2 on the ranks of a two-stage LLM, DP 1; 4 microbatches of 1 sample, 2 in each encoder slice.
    program = program_of(pair_layout(Degrees(1, 1, 1, 2), Degrees(1, 1, 2, 1), colocated=True, num_ranks=2, batch=4), 4)
    assert [program.view(a).members for a in program.forward_actions(0).ravel().tolist()] == [(0, 1), (2, 3)]
    start, _, _ = place_actions(
        program, durations(program, lambda view: 3.0 if view.module == "vision" else 1.0), no_delay(program)
    )
    # rank 0: VVV F0 F1 .  B0 F2 B1 F3 B2 .  B3 vvv     second encoder slice on rank 1, all before the LLM
    # rank 1: VVV .  F0 B0 F1 B1 F2 B2 F3 B3 .  vvv
    assert start[program.forward_actions(0)].ravel().tolist() == [0, 0]
    assert start[program.forward_actions(1)].tolist() == [[3, 4], [4, 6], [7, 8], [9, 10]]
    assert start[program.backward_actions(1)].tolist() == [[6, 5], [8, 7], [10, 9], [12, 11]]
    # The first slice fed microbatches 0 and 1, but rank 0 is busy until 13; the second has its gradients at 13.
    assert start[program.backward_actions(0)].ravel().tolist() == [13, 13]


def test_graph_aware_1f1b_with_two_encoder_replicas_by_hand() -> None:
    # Encoder replicas on ranks 2 and 3 halve each microbatch of 2 for a two-stage LLM on ranks 0 and 1.
    layout = pair_layout(Degrees(1, 1, 1, 2), Degrees(1, 1, 2, 1), colocated=False, num_ranks=4)
    assert [m.ranks.ravel().tolist() for m in layout.modules] == [[2, 3], [0, 1]]
    program = program_of(layout, 6, microbatch_size=2)
    for lane in (2, 3):
        assert passes(program, lane) == [f"vision {p}" for p in ("F0", "F1", "F2", "B0", "B1", "B2")]
    start, _, _ = place_actions(program, durations(program, lambda _: 1.0), no_delay(program))
    # V: F0 F1 F2 .  .  B0 .  B1 .  B2      both encoder replicas
    # 0: .  F0 F1 .  B0 F2 B1 .  B2
    # 1: .  .  F0 B0 F1 B1 F2 B2
    assert start[program.forward_actions(1)].tolist() == [[1, 2], [2, 4], [5, 6]]
    assert start[program.backward_actions(1)].tolist() == [[4, 3], [6, 5], [8, 7]]
    assert start[program.backward_actions(0)].ravel().tolist() == [5, 7, 9] * 2
