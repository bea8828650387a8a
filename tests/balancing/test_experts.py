"""Degrees of expert parallelism: the usual one, those that the tuner walks, and where replicas' ranks lie."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from entrain_bench.balancing.chunk_estimates import packed_chunks_s
from entrain_bench.balancing.experts import expert_jobs, expert_variants, usual_degree
from entrain_bench.balancing.planning import place_chain
from entrain_bench.balancing.rounds import layouts_with_widths
from entrain_bench.balancing.shardings import sharded_as
from entrain_bench.base.errors import UserError
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program.assignment import Chunks
from entrain_bench.program.layout import Layout, layout_from_json, layout_to_json
from entrain_bench.specs.job import Degrees, Job, LayoutRequest
from support.builders import profile_of, samples, tiny_cluster, tiny_job, tiny_model

EXPERTS = {"count": 8, "top_k": 2, "ffn_hidden_size": 32}
MODEL = tiny_model(encoder=0, llm=6, experts=EXPERTS)


def job_of(nodes: int = 2, gpus: int = 4, **asked: int) -> Job:
    return tiny_job(MODEL, tiny_cluster(nodes, gpus), microbatch_size=1, request=LayoutRequest(**asked))


def chain(job: Job, tp: int, cp: int, pp: int, dp: int) -> Layout:
    layers = ((8,),) if pp == 1 else ((4, 4),)
    return place_chain(job, Degrees(tp, cp, pp, dp), layers, (False,), leading=False)


@pytest.mark.parametrize(
    ("degrees", "ep"),
    # All replicas of a node; those that TP leaves there; of a stage, whose replicas are neighbours; ranks of CP.
    [((1, 1, 1, 8), 4), ((2, 1, 1, 4), 2), ((4, 1, 1, 2), 1), ((1, 1, 2, 4), 4), ((1, 4, 1, 2), 4), ((1, 8, 1, 1), 4)],
)
def test_groups_lie_inside_a_node_by_default(degrees: tuple[int, int, int, int], ep: int) -> None:
    placed = chain(job_of(), *degrees).modules[0]
    assert placed.ep == ep
    if placed.expert_groups is not None:
        assert np.ptp(placed.expert_groups // 4, axis=1).max() == 0


def test_a_requested_degree_is_kept_or_refused() -> None:
    assert chain(job_of(ep=8), 1, 1, 1, 8).modules[0].ep == 8
    assert chain(job_of(ep=1), 1, 1, 1, 8).modules[0].ep == 1
    with pytest.raises(UserError, match=r"layout\.ep=8: must be a divisor of dp x cp=4"):
        chain(job_of(ep=8), 2, 1, 1, 4)
    with pytest.raises(UserError, match=r"layout\.ep=2: must be 1 or null: model=handmade has no experts"):
        tiny_job(tiny_model(), request=LayoutRequest(ep=2))


def test_the_tuner_walks_every_degree_that_a_plan_can_have() -> None:
    job = job_of()
    layout = chain(job, 1, 1, 1, 8)
    variants = [*expert_variants(job)]
    assert [variant.value for variant in variants] == [1, 2, 4, 8]
    assert [variant.of(layout).modules[0].ep for variant in variants] == [1, 2, 4, 8]
    # A plan that cannot have a degree stays.
    narrow = chain(job, 2, 1, 1, 4)
    assert [variant.of(narrow).modules[0].ep for variant in variants] == [1, 2, 4, 2]
    assert [*expert_variants(job_of(ep=2))] == []
    assert [one.request.ep for one in expert_jobs(job_of(dp=8))] == [None, 8]
    assert [one.request.ep for one in expert_jobs(job_of(dp=1))] == [None]


@pytest.mark.parametrize("ep", [1, 4, 8])
def test_beliefs_have_the_exchange_and_the_rest_of_the_experts(ep: int) -> None:
    job = job_of(ep=ep)
    layout = chain(job, 1, 1, 1, 8)
    shapes = samples(*[(4000, [])] * 8)
    profile = profile_of(job, shapes)
    zero = np.zeros(8, np.int64)
    chunks = Chunks(np.arange(8), zero, zero, np.arange(9), np.arange(8))
    forward, backward = packed_chunks_s(MODEL.llm, layout.modules[0], shapes, chunks, profile)
    true = CostTruth(MODEL, job.cluster, job.framework).chunk_times(MODEL.llm, layout.modules[0], shapes, chunks)
    # Lengths between two measured ones are interpolated.
    assert forward == pytest.approx(true.forward_s + true.forward_comm_s, rel=0.02)
    assert backward == pytest.approx(true.backward_s + true.backward_comm_s, rel=0.02)
    assert (true.forward_comm_s[0, 0] > 0.05 * forward[0, 0]) == (ep > 1)
    units = profile.estimates.units(MODEL.llm, shapes, 1, 1, layout.modules[0].expert_groups)
    assert units == pytest.approx(forward[:, 0], rel=0.02)


def test_groups_of_several_widths_have_no_expert_parallelism() -> None:
    assert [*layouts_with_widths(job_of(ep=1))]
    assert not [*layouts_with_widths(job_of(ep=2))]


def test_a_plan_keeps_its_degree() -> None:
    layout = chain(job_of(), 1, 1, 1, 8)
    again = layout_from_json(layout_to_json(layout))
    assert again.modules[0].ep == 4
    assert again.content == layout.content != replace(layout, modules=(replace(layout.modules[0], ep=2),)).content
    assert "ep4" in layout.describe()["llm"]


def test_sharded_weights_keep_their_expert_parallelism_except_in_hybrids() -> None:
    job = job_of()
    placed = chain(job, 1, 1, 1, 8).modules[0]
    for kind, ep in (("zero2", 4), ("zero3", 4), ("zero3_kept", 4), ("hybrid", 1)):
        assert sharded_as(placed, kind, 4).ep == ep
        assert usual_degree(job, sharded_as(placed, kind, 4), MODEL.llm) == ep
