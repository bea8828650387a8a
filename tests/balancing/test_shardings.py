"""Kinds of sharding as a knob: which a planner takes, the job they make, and which of them the tuner chooses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from entrain_bench.balancing.interface import MakeProgram, Strategy
from entrain_bench.balancing.interleaved import Interleaved
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.shardings import job_for, job_sharded_as, sharding_variants
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program.layout import Layout
from entrain_bench.specs.cluster import ClusterSpec
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.job import Job, LayoutRequest
from entrain_bench.specs.sharding import HYBRID, ZERO1, ZERO2, ZERO3, ZERO3_KEPT
from entrain_bench_strategies.fsdp import FsdpPlanner
from entrain_bench_strategies.megatron import ArrivalOrder, MegatronPlanner
from support.builders import chain_layout, profile_of, random_samples, tiny_cluster, tiny_job, tiny_model

MODEL = tiny_model()
SHAPES = random_samples(np.random.default_rng(3), 200)
FSDP = FsdpPlanner(profile_samples=16)
STRATEGY = Strategy("tiny", FSDP, ArrivalOrder(), Interleaved())


class OnlyZero1:
    """A planner that states no kinds of sharding."""


def job_on(cluster: ClusterSpec, sharding: str | None = None, **asked: int | None) -> Job:
    request = LayoutRequest(sharding=sharding, **asked)
    return tiny_job(MODEL, cluster, global_batch=32, microbatch_size=2, request=request)


def kinds(job: Job, planner: object) -> list[object]:
    return [variant.value for variant in sharding_variants(job, planner)]


def kinds_of(layout: Layout) -> set[str]:
    return {placed.sharding for placed in layout.modules}


def test_variants_are_the_other_kinds_of_a_free_job() -> None:
    one, two = job_on(tiny_cluster(1)), job_on(tiny_cluster(2))
    assert kinds(two, FSDP) == [ZERO1, ZERO2, ZERO3_KEPT, HYBRID]
    assert kinds(two, MegatronPlanner()) == [ZERO2, ZERO3, ZERO3_KEPT, HYBRID]
    # One node has nothing to be hybrid over.
    assert kinds(one, FSDP) == [ZERO1, ZERO2, ZERO3_KEPT]
    assert kinds(two, OnlyZero1()) == []
    assert kinds(job_on(tiny_cluster(2), ZERO3), FSDP) == []
    for options in (FrameworkOptions(distributed_optimizer=False), FrameworkOptions(encoder_optimizers=2)):
        assert kinds(replace(two, framework=options), FSDP) == []


def test_a_variant_changes_plans_in_one_stage_only() -> None:
    job = job_on(tiny_cluster(2))
    whole = Layout(
        tuple(replace(chain_layout(MODEL, 1, 1, 1, dp=8).modules[1], module=module.name) for module in MODEL.modules), 1
    )
    staged = chain_layout(MODEL, 2, 2, 4)
    for variant in sharding_variants(job, FSDP):
        assert kinds_of(variant.of(whole)) == {variant.value}
        assert variant.of(staged) is staged


def test_hybrid_sharding_spans_the_nodes_of_a_module() -> None:
    planned = STRATEGY.plan(profile_of(job_on(tiny_cluster(2, 4)), SHAPES))
    assert planned.modules[0].ranks.size == 8
    (hybrid,) = (one for one in sharding_variants(job_on(tiny_cluster(2, 4)), FSDP) if one.value == HYBRID)
    assert {placed.nodes for placed in hybrid.of(planned).modules} == {2}


def test_the_job_of_a_plan_asks_for_its_kind_unless_it_is_the_planners_own() -> None:
    job = job_on(tiny_cluster())
    plan = STRATEGY.plan(profile_of(job, SHAPES))
    assert kinds_of(plan) == {ZERO3}
    assert job_sharded_as(job, FSDP, plan) is job
    megatrons = job_sharded_as(job, MegatronPlanner(), plan)
    assert (megatrons.request.sharding, megatrons.request.pp) == (ZERO3, 1)
    with pytest.raises(IncompatibleError, match=r"^layout\.sharding=zero3: must be null or zero1 with"):
        job_for(megatrons, OnlyZero1())
    with pytest.raises(IncompatibleError, match=r"^layout\.pp=2: must be 1 or null with layout\.sharding=zero3"):
        job_for(job_on(tiny_cluster(), ZERO3, pp=2), MegatronPlanner())


def tuned(cluster: ClusterSpec, sharding: str | None = None, *, free: bool = True) -> tuple[Layout, Profile]:
    """The plan that the tuner makes of FSDP's, whose kind of sharding may be free."""
    profile = replace(profile_of(job_on(cluster, sharding, tp=1, cp=1), SHAPES), tuning_budget=32)
    return replace(STRATEGY, free_sharding=free).plan(profile), profile


def test_the_tuner_takes_another_kind_if_it_is_faster() -> None:
    # Over a slow network, ZeRO-3 gathers weights in every pass of every microbatch.
    cluster = tiny_cluster(8, 1)
    freed, profile = tuned(cluster)
    kept, _ = tuned(cluster, free=False)
    assert kinds_of(kept) == {ZERO3}
    assert kinds_of(freed) == {ZERO1}
    batch = profile.samples.draw(profile.job.global_batch)
    programs = MakeProgram(STRATEGY, profile)
    assert profile.trial_s(programs(batch, freed)) < profile.trial_s(programs(batch, kept))
    assert kinds_of(tuned(cluster, ZERO3)[0]) == {ZERO3}


def test_the_tuner_keeps_the_planners_own_kind_on_ties() -> None:
    # One rank has nobody to share anything with.
    assert kinds_of(tuned(tiny_cluster(1, 1))[0]) == {ZERO3}


def test_a_mixture_gets_the_least_microbatches_if_no_others_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = {"count": 8, "top_k": 2, "ffn_hidden_size": 32}
    model = tiny_model(encoder=0, llm=6, experts=experts)
    shapes = random_samples(np.random.default_rng(3), 200, max_items=0)
    request = LayoutRequest(tp=1, cp=1, dp=8, recompute=())
    free = tiny_job(model, tiny_cluster(2, 4), global_batch=128, microbatch_size=1, request=request)
    free = replace(free, free_microbatch_size=True)
    strategy = Strategy("tiny", MegatronPlanner(), ArrivalOrder(), Interleaved())

    def planned(job: Job) -> tuple[Layout, float]:
        profile = replace(profile_of(job, shapes), tuning_budget=32)
        layout = strategy.plan(profile)
        program = MakeProgram(strategy, profile)(profile.samples.draw(job.global_batch), layout)
        return layout, float(profile.memory.peak_bytes(program).max())

    _, least = planned(free.with_microbatch_size(1))
    monkeypatch.setattr("entrain_bench.balancing.fixed_jobs.MAX_JOBS", 1)
    large, need = planned(free)
    assert need > 3 * least
    assert large.num_microbatches < 16
    assert planned(replace(free, memory_budget_bytes=2 * least))[0].num_microbatches == 16
