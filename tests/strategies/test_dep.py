"""DEP: who encodes what and when, what encoders keep, and that their layouts and programs hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.interface import Strategy
from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.costs.memory import Memory
from entrain_bench.program import Program
from entrain_bench.program.assignment import ModuleAssignment, same_microbatches
from entrain_bench.program.layout import Layout, check_layout
from entrain_bench.program.validate import check_program
from entrain_bench.specs.job import Degrees, LayoutRequest
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench_strategies.hetero import ColocatedPlanner, Pair, place_pair
from entrain_bench_strategies.mdp import BalancedVision, DecoupledScheduler, cut_passes, share_long
from support.builders import passes, profile_of, random_samples, samples, tiny_cluster, tiny_job
from support.hetero import MODEL, pair_layout, profile_for

# Four ranks, two pipelines of two stages; encoder replicas 0 and 2 are on the first stages.
TWO_BY_TWO = pair_layout(Degrees(1, 1, 1, 4), Degrees(1, 1, 2, 2), colocated=True, num_ranks=4, batch=8)


def at_once(layout: Layout) -> Layout:
    vision, llm = layout.modules
    return replace(layout, modules=(replace(vision, recompute=True, recompute_whole=True), llm))


def assigned(shapes: SampleShapes, layout: Layout = TWO_BY_TWO, **options: object) -> ModuleAssignment:
    profile = profile_for(ranks=4, batch=8)
    return BalancedVision(**options).assign(shapes, layout, profile).modules[0]  # type: ignore[arg-type]


def scheduled(shapes: SampleShapes, layout: Layout, **options: object) -> Program:
    profile = profile_for(ranks=4, batch=8)
    assignment = BalancedVision(**options).assign(shapes, layout, profile)  # type: ignore[arg-type]
    program = DecoupledScheduler().schedule(shapes, layout, assignment, profile)
    check_program(program)
    return program


def test_items_go_to_ranks_of_any_replica_by_hand() -> None:
    # Samples 0, 2, 4 are the first replica's, 1 and 3 the second's; 4 x 25 = 100 patches are an image of 25 tokens.
    shapes = samples((10, [700]), (10, [100]), (10, [500]), (10, []), (10, [400]))
    # The two largest to the first replica's ranks, the third to one of the second's, the last to the other of these.
    assert assigned(shapes, bubbles=False).replica.tolist() == [0, 3, 1, 2]
    # Each item goes to the rank that hands over its embeddings, if that has no more items than the others.
    assert assigned(shapes, bubbles=False, load="items").replica.tolist() == [0, 2, 1, 3]


def test_ranks_that_wait_take_the_items_of_later_microbatches() -> None:
    # Microbatches 0 and 1 of both replicas are encoded first, an image on each rank. The LLM is so slow that second
    # stages, on ranks 1 and 3, have time for all of the others.
    shapes = samples(*[(3000, [40])] * 8)
    vision = assigned(shapes)
    assert vision.replica.tolist() == [0, 2, 1, 3, 1, 3, 1, 3]
    assert vision.microbatch.tolist() == [0] * 4 + [1] * 4
    even = assigned(shapes, bubbles=False)
    assert np.bincount(even.replica).tolist() == [2, 2, 2, 2]
    # A pipeline of one stage waits for nothing.
    flat = pair_layout(Degrees(1, 1, 1, 4), Degrees(1, 1, 1, 4), colocated=True, num_ranks=4, batch=8)
    assert np.bincount(assigned(shapes, flat).replica).tolist() == [2, 2, 2, 2]


def test_the_order_of_passes_by_hand() -> None:
    program = scheduled(samples(*[(3000, [40])] * 8), TWO_BY_TWO)
    llm = [["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"], ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"]]
    first, second = ([f"llm {name}" for name in names] for names in llm)
    assert passes(program, 0) == ["vision F0", *first, "vision B0"]
    assert passes(program, 1) == ["vision F0", "vision F1", *second, "vision B0", "vision B1"]


def test_passes_are_cut_by_tokens_and_those_of_later_microbatches_come_last() -> None:
    worker = np.array([0, 0, 0, 1, 0])
    later = np.array([False, False, True, False, True])
    tokens = np.array([5, 4, 3, 9, 2])
    assert cut_passes(2 * worker + later, later, tokens, 8).tolist() == [0, 0, 1, 0, 1]
    assert cut_passes(2 * worker + later, later, tokens, 4).tolist() == [0, 1, 2, 0, 2]
    none = np.zeros(0, np.int64)
    assert cut_passes(none, none.astype(bool), none, 4).tolist() == []


def test_encoders_keep_inputs_and_outputs_and_make_the_rest_again() -> None:
    shapes = samples(*[(10, [40])] * 8)
    memory = Memory(MODEL)
    kept, whole, by_layer = (
        scheduled(shapes, layout, bubbles=False)
        for layout in (
            TWO_BY_TWO,
            at_once(TWO_BY_TWO),
            replace(TWO_BY_TWO, modules=(replace(TWO_BY_TWO.modules[0], recompute=True), TWO_BY_TWO.modules[1])),
        )
    )
    vision = MODEL.modules[0]
    forward, backward = whole.forward_actions(0).ravel(), whole.backward_actions(0).ravel()
    change, working = memory.action_bytes(whole)
    # Two images a rank, each of 40 patches and 10 tokens for the LLM, in bf16.
    ends = 2 * (40 * vision.layers[0].input_bytes_per_token + 10 * 2 * MODEL.llm.config.hidden_size)
    assert change[forward].tolist() == [ends] * 4
    assert change[backward].tolist() == [-ends] * 4
    everything, need = memory.action_bytes(kept)
    again, _ = memory.action_bytes(by_layer)
    assert ends < again[forward].min() < everything[forward].min()
    # All that the others keep is there while a backward runs, and not while the LLM does.
    assert working[backward].tolist() == (need[backward] + everything[forward] - ends).tolist()
    assert working[forward].tolist() == need[forward].tolist()
    assert memory.peak_bytes(whole).max() <= memory.peak_bytes(kept).max()


def test_one_pass_at_a_time_is_there_again() -> None:
    shapes = samples(*[(10, [400])] * 8)
    memory = Memory(MODEL)
    one, two = (scheduled(shapes, at_once(TWO_BY_TWO), bubbles=False, pass_tokens=most) for most in (800, 400))
    assert len(one.chunks[0]) == 4
    assert len(two.chunks[0]) == 8
    assert memory.peak_bytes(two).max() < memory.peak_bytes(one).max()


def test_only_encoders_in_one_stage_are_recomputed_at_once() -> None:
    cluster = tiny_cluster(1, 8)
    check_layout(at_once(TWO_BY_TWO), MODEL, cluster)
    vision, llm = TWO_BY_TWO.modules
    not_again = replace(TWO_BY_TWO, modules=(replace(vision, recompute_whole=True), llm))
    of_llm = replace(TWO_BY_TWO, modules=(vision, replace(llm, recompute=True, recompute_whole=True)))
    for layout in (not_again, of_llm):
        with pytest.raises(UserError, match=r"^layout\.(vision|llm)\.recompute_whole=True: must be false but for"):
            check_layout(layout, MODEL, cluster)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["patches", "items", "seconds"]), st.booleans(), st.integers(1, 2))
def test_programs_hold_and_no_rank_is_ahead_by_more_than_an_item(
    seed: int, load: str, bubbles: bool, turns: int
) -> None:
    job = tiny_job(MODEL, tiny_cluster(1, 4), global_batch=16, microbatch_size=1)
    pair = Pair(Degrees(1, 1, 1, 4), Degrees(1, 1, 2, 2), turns)
    layers = [(4,), (2, 2) if turns == 1 else (1, 1, 1, 1)]
    layout = at_once(place_pair(job, pair, layers, [True, False], colocated=True))
    shapes = random_samples(np.random.default_rng(seed), 16)
    profile = profile_of(job, shapes)
    assignment = BalancedVision(load=load, pass_tokens=500, bubbles=bubbles).assign(shapes, layout, profile)
    check_program(DecoupledScheduler().schedule(shapes, layout, assignment, profile))
    if load == "patches" and not bubbles:
        tokens = MODEL.modules[0].lengths(shapes, MODEL.modules[0].units(shapes))
        loads = np.bincount(assignment.modules[0].replica, tokens, minlength=4)
        assert loads.max() - loads.min() <= 1.01 * tokens.max(initial=1)


def test_the_planner_offers_virtual_stages_and_recomputes_encoders_unless_asked_otherwise() -> None:
    shapes = samples(*[(100, [400])] * 16)

    def planned(recompute: tuple[str, ...] | None = None) -> Layout:
        request = LayoutRequest(tp=1, cp=1, pp=2, dp=2, recompute=recompute)
        job = tiny_job(MODEL, tiny_cluster(1, 4), global_batch=16, microbatch_size=1, request=request)
        planner = ColocatedPlanner(encoder_tp=1, virtual_stages=(2,), recompute_encoders=True, num_trials=1)
        return Strategy("dep", planner, BalancedVision(), DecoupledScheduler()).plan(profile_of(job, shapes))

    vision, llm = planned().modules
    assert (llm.pp, llm.stages_per_rank, llm.ranks[0, :, 0].tolist()) == (4, 2, [0, 1, 0, 1])
    assert (vision.dp, vision.recompute, vision.recompute_whole) == (4, True, True)
    assert not any(placed.recompute or placed.recompute_whole for placed in planned(()).modules)


def test_virtual_stages_need_microbatches_that_fill_groups() -> None:
    job = tiny_job(MODEL, tiny_cluster(1, 2), global_batch=3, microbatch_size=1)
    pair = Pair(Degrees(1, 1, 1, 2), Degrees(1, 1, 2, 1), 2)
    layout = place_pair(job, pair, [(4,), (1, 1, 1, 1)], [False, False], colocated=True)
    shapes = samples(*[(10, [40])] * 3)
    zero = np.zeros(3, np.int64)
    assignment = same_microbatches(MODEL, shapes, zero, np.arange(3), np.arange(3))
    with pytest.raises(IncompatibleError, match=r"has 3 microbatches; .* a multiple of 2"):
        DecoupledScheduler().schedule(shapes, layout, assignment, profile_of(job, shapes))


def test_ranks_share_an_image_that_is_longer_than_an_even_share_of_all() -> None:
    # Image seconds 8, 1, 1, 1, 1: an even share of four ranks is 3, so that four ranks share the first one.
    vision = replace(TWO_BY_TWO.modules[0], widths=((1, 1), (1, 2), (1, 4)))
    load = np.zeros(4, np.int64)
    cost = np.array([1, 8, 1, 1, 1])
    group, place = share_long(cost, cost.astype(float), vision, load)
    # Groups of one rank are 0 to 3, of two 4 and 5, of four 6.
    assert group.tolist() == [-1, 6, -1, -1, -1]
    assert place.tolist() == [-1, 0, -1, -1, -1]
    assert load.tolist() == [2, 2, 2, 2]
    # Of 5, 4, 1, 1, 1 each of the first two is longer than 3 and takes two ranks.
    group, place = share_long(np.array([5, 4, 1, 1, 1]), np.array([5.0, 4, 1, 1, 1]), vision, load := np.zeros(4, int))
    assert group.tolist() == [4, 5, -1, -1, -1]
    assert place.tolist() == [0, 1, -1, -1, -1]
    assert load.tolist() == [3, 3, 2, 2]


def test_programs_with_shared_images_hold() -> None:
    vision, llm = TWO_BY_TWO.modules
    layout = replace(TWO_BY_TWO, modules=(replace(vision, widths=((1, 1), (1, 2), (1, 4))), llm))
    program = scheduled(samples((10, [4000]), *[(10, [40])] * 7), layout)
    assert program.chunks[0].replica.tolist()[-1] == 6
