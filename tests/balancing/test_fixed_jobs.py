"""Fixed jobs whose states fit memory: of a model that no rank can hold whole, those of long pipelines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from entrain_bench.balancing import fixed_jobs as fixed
from entrain_bench.balancing.candidates import Candidate
from entrain_bench.balancing.fixed_jobs import fixed_jobs, holds_states
from entrain_bench.balancing.interface import Strategy
from entrain_bench.balancing.interleaved import Interleaved
from entrain_bench.balancing.planning import place_chain
from entrain_bench.balancing.profile import Profile
from entrain_bench.specs.job import Job, LayoutRequest
from entrain_bench_strategies.megatron import ArrivalOrder, MegatronPlanner
from support.builders import even, placed, profile_of, random_samples, tiny_cluster, tiny_job, tiny_model

# No encoder, 14 blocks: 16 layers, of which stages of a pipeline hold as many each.
MODEL = tiny_model(encoder=0, llm=14)
# Short, so that states are nearly all of the memory.
SHAPES = random_samples(np.random.default_rng(3), 100, longest=16, max_items=0)


def pipelines(profile: Profile) -> Iterable[Candidate]:
    """The even pipeline of every choice of degrees that a job leaves."""
    for degrees in profile.job.degrees():
        layers = [even(len(MODEL.llm.layers), degrees.pp)]
        yield Candidate(1.0, place_chain(profile.job, degrees, layers, (False,), leading=False))


def states_bytes(stages: int, dp: int) -> float:
    """Weights, gradients and optimizer states on the fullest rank of an even pipeline."""
    profile = profile_of(tiny_job(MODEL), SHAPES)
    layout = placed(MODEL.llm, np.arange(stages * dp).reshape(dp, stages, 1))
    return float(profile.memory.stage_state_bytes(MODEL.llm, layout).max())


def tight_job(**asked: int) -> Job:
    """A job on 8 ranks whose plans may hold the states of four stages, not those of two."""
    assert states_bytes(4, 2) < states_bytes(2, 4) < states_bytes(1, 8)
    job = tiny_job(MODEL, tiny_cluster(1, 8), microbatch_size=1, request=LayoutRequest(**asked))
    share = job.planning_budget_bytes / job.memory_budget_bytes
    return replace(job, memory_budget_bytes=(states_bytes(4, 2) + states_bytes(2, 4)) / 2 / share)


@pytest.mark.parametrize(("dp", "holds"), [(8, False), (4, False), (2, True), (1, True)])
def test_only_long_pipelines_hold_the_states(dp: int, holds: bool) -> None:
    job = tight_job(tp=1, cp=1, dp=dp)
    profile = profile_of(job, SHAPES)
    assert holds_states(profile, job, [pipelines], chosen_later=False) == holds
    if dp >= 4:
        # Even shares of the model already exceed memory: no planner is asked.
        assert not holds_states(profile, job, [lambda _: pytest.fail("asked")], chosen_later=False)
    # Nor does a planner that offers none, or whose candidates are refused.
    assert not holds_states(profile, job, [lambda _: []], chosen_later=False)
    roomy = replace(job, memory_budget_bytes=1e12)
    assert holds_states(profile_of(roomy, SHAPES), roomy, [lambda _: []], chosen_later=False)


def test_jobs_without_memory_for_states_do_not_crowd_out_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed, "MAX_JOBS", 3)
    job = tight_job(tp=1, cp=1)
    profile = profile_of(job, SHAPES)
    fits = partial(holds_states, profile, sets=[pipelines], chosen_later=False)
    # Plain data parallelism is estimated to be fastest.
    assert fixed_jobs(profile, SHAPES)[0].request.dp == 8
    assert {one.request.dp for one in fixed_jobs(profile, SHAPES, lambda one: fits(job=one))} == {1, 2}
    # If nothing fits, planners are asked about the best, to say why.
    assert fixed_jobs(profile, SHAPES, lambda _: False) == fixed_jobs(profile, SHAPES)


def test_the_tuner_finds_the_pipeline() -> None:
    strategy = Strategy("tiny", MegatronPlanner(profile_samples=16), ArrivalOrder(), Interleaved())
    profile = replace(profile_of(tight_job(tp=1, cp=1), SHAPES), tuning_budget=16)
    assert strategy.plan(profile).modules[0].pp >= 4
