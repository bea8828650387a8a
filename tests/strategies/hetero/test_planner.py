"""Heterogeneous parallelism: the search space, estimates and plans."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from entrain_bench.base.errors import IncompatibleError, OutOfMemoryError, UserError
from entrain_bench.specs.job import Degrees, LayoutRequest
from entrain_bench.specs.shapes import shapes_from_lists
from entrain_bench_strategies.hetero import (
    ColocatedPlanner,
    NoncolocatedPlanner,
    Pair,
    average_layer_s,
    colocated_pairs,
    estimate_s,
    island_sizes,
    list_candidates,
    noncolocated_pairs,
)
from support.builders import (
    GIB,
    profile_of,
    samples,
    tiny_cluster,
    tiny_job,
    tiny_model,
)
from support.hetero import MODEL, ROW, profile_for, system


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
    together = keys(colocated_pairs(job))
    assert len(together) == len(expected)
    assert set(together) == expected
    sizes = tuple(island_sizes(job))
    if nodes * gpus == 1:
        assert sizes == ()
        with pytest.raises(UserError, match="use the 1 ranks"):
            noncolocated_pairs(job)
        return
    expected = {key for key in brute_force(nodes * gpus, False, sizes) if max(key[0], key[3]) <= gpus}
    apart = keys(noncolocated_pairs(job))
    assert len(apart) == len(expected) > 0
    assert set(apart) == expected
    assert set(keys(noncolocated_pairs(job, sizes[-1]))) == {
        key for key in expected if key[0] * key[1] * key[2] == sizes[-1]
    }


def test_requests_bind_the_llm() -> None:
    job = tiny_job(MODEL, tiny_cluster(2, 4), request=LayoutRequest(tp=2, cp=1, dp=2))
    pairs = colocated_pairs(job)
    assert {(p.llm.tp, p.llm.pp, p.llm.dp) for p in pairs} == {(2, 2, 2)}
    assert {(p.encoder.tp, p.encoder.dp) for p in pairs} == {(1, 8), (2, 4), (4, 2)}
    whole = replace(job, request=LayoutRequest(tp=2, cp=1, dp=2, pp=2))
    # A chain of two stages leaves one stage to the LLM: 4 ranks, and 4 to the encoder.
    assert {(p.encoder.pp, p.llm.pp, p.llm.dp) for p in noncolocated_pairs(whole)} == {(1, 1, 2)}
    for request in (LayoutRequest(tp=3), LayoutRequest(tp=2, dp=2, pp=3), LayoutRequest(dp=3)):
        with pytest.raises(UserError, match=r"layout\.|dividing"):
            colocated_pairs(replace(job, request=request))


# Estimates and plans


def test_estimates_by_hand() -> None:
    encoder, llm = np.array([2.0]), np.array([3.0, 5.0])
    assert estimate_s(encoder, llm, 4, colocated=True) == 2 + 8 + 3 * 5
    assert estimate_s(encoder, llm[:1], 4, colocated=True) == 4 * (2 + 3)
    assert estimate_s(np.array([7.0]), llm, 4, colocated=False) == 15 + 3 * 7


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
    for candidate in list_candidates(profile, shapes, [Pair(encoder, llm)], colocated=colocated, offload=True):
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


def test_nothing_that_fits_is_an_error_that_says_so() -> None:
    job = tiny_job(MODEL, tiny_cluster(1, 4), budget_bytes=0.001 * GIB)
    with pytest.raises(OutOfMemoryError, match="GiB more than planners may use"):
        system(ColocatedPlanner(profile_samples=8)).plan(profile_of(job, samples(ROW)))


def test_context_parallelism_of_the_llm_is_searched_beyond_a_node_and_the_encoders_is_1() -> None:
    job = tiny_job(MODEL, tiny_cluster(2, 4), global_batch=8, microbatch_size=1)
    for pairs in (colocated_pairs(job), noncolocated_pairs(job, 4)):
        assert {pair.encoder.cp for pair in pairs} == {1}
        assert {pair.llm.cp for pair in pairs} >= {1, 2, 4}
    assert max(pair.llm.tp * pair.llm.cp for pair in colocated_pairs(job)) == 8


def test_two_encoders_share_a_grid_and_no_encoder_is_refused() -> None:
    model = tiny_model(encoder=2, llm=2, audio=2)
    both = (10, [("image", 40, 10), ("audio", 30, 15)])
    shapes = shapes_from_lists(["image", "audio"], [both, (20, [("image", 80, 20)])])
    for planner in (ColocatedPlanner(profile_samples=8), NoncolocatedPlanner(profile_samples=8)):
        layout = system(planner).plan(profile_of(tiny_job(model, tiny_cluster(1, 4)), shapes))
        assert np.array_equal(layout.modules[0].ranks, layout.modules[1].ranks)
        with pytest.raises(IncompatibleError, match="has no encoder"):
            system(planner).plan(profile_of(tiny_job(tiny_model(encoder=0)), samples((10, []))))
