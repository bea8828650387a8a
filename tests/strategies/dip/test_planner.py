"""DIP's assigner and planner: sub-microbatches by hand, chunks a rank, recomputation."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrain_bench.balancing.candidates import MEMORY_BATCHES
from entrain_bench.balancing.interface import Scheduler, Strategy
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program import Program
from entrain_bench.specs.job import PLANNING_SHARE, Degrees, LayoutRequest
from entrain_bench_strategies.dip import DipAssigner, DipPlanner, DipScheduler
from entrain_bench_strategies.dip.partitioner import (
    chunks_per_rank,
    efficient_items,
    sub_microbatches,
)
from entrain_bench_strategies.optimus import OptimusScheduler
from support.builders import (
    profile_of,
    samples,
    tiny_cluster,
    tiny_job,
    tiny_model,
)
from support.dip import (
    MEMORY,
    MODEL,
    peak_activations,
    program_of,
    seeds,
)

# ---- assigner


@given(seeds, st.integers(1, 5), st.integers(1, 3))
def test_sub_microbatches_are_no_larger_than_asked_and_as_few_as_can_be(seed: int, most: int, dp: int) -> None:
    rng = np.random.default_rng(seed)
    group = np.sort(rng.integers(0, 9, 30))
    place = sub_microbatches(group % dp, group // dp, most)
    for r in range(dp):
        mine = place[group % dp == r]
        assert np.unique(mine).tolist() == list(range(len(np.unique(mine)))), "consecutive"
        assert np.all(np.diff(mine) >= 0), "in arrival order"
    for g in np.unique(group):
        sizes = np.unique(place[group == g], return_counts=True)[1]
        assert sizes.max() <= most
        assert sizes.max() - sizes.min() <= 1
        assert len(sizes) == -(-np.sum(group == g) // most)
    cuts = {(g % dp, p) for g, p in zip(group, place, strict=True)}
    assert len(cuts) == sum(len(np.unique(place[group == g])) for g in np.unique(group)), "cuts do not cross"


@pytest.mark.wide
@pytest.mark.parametrize(
    ("each", "launch_s"), [*product([1, 40, 300, 5000], [1e-6, 1e-3]), (131_072, 1e3), (200_000, 1e3)]
)
def test_efficient_items_is_the_smallest_that_reaches_the_share_of_the_peak(each: int, launch_s: float) -> None:
    job = tiny_job(MODEL, tiny_cluster(launch_s=launch_s))
    profile = profile_of(job, samples((10, [each])))
    module = MODEL.encoders[0]
    found = efficient_items(profile, module, samples((10, [each, each])), 1, 1)

    def rate(items: int) -> float:
        times = profile.layers.measure(module, np.full(items, each), 1, 1)
        return items / sum(float(times[kind].total_s[0]) for kind in module.layer_kind)

    peak = max(rate(2**i) for i in range(max(1, (131_072 // each).bit_length())))
    assert rate(found) >= 0.95 * peak
    if launch_s >= 1e-3:
        assert all(rate(n) < 0.95 * peak for n in range(1, found))


# ---- planner


def test_chunks_per_rank_follow_the_latencies() -> None:
    model = tiny_model(encoder=6, llm=18)
    shapes = samples((20, [1600, 1600]), (20, [1600]))
    profile = profile_of(tiny_job(model, microbatch_size=3), shapes)
    degrees = Degrees(1, 1, 1, 1)
    vision, llm = model.modules
    times = []
    for module, count, tokens in ((vision, efficient_items(profile, vision, shapes, 1, 1), 1600), (llm, 3, None)):
        each = tokens or round(float(shapes.llm_tokens.mean()))
        measured = profile.layers.measure(module, np.full(count, each), 1, 1)
        times.append(sum(float(measured[kind].total_s[0]) for kind in module.layer_kind))
    ratio = int(times[1] / times[0])
    assert 1 < ratio < 20
    assert chunks_per_rank(profile, shapes, degrees) == (1, ratio)
    # Every stage of every chunk has a layer; a module without items does not count.
    assert chunks_per_rank(profile, shapes, Degrees(1, 1, 8, 1)) == (1, min(ratio, 2))
    assert chunks_per_rank(profile, samples((2000, [])), degrees) == (1, 1)


@pytest.mark.wide
def test_the_planner_keeps_one_chunk_where_the_order_takes_no_more() -> None:
    shapes = samples(*[(4000, [40])] * 8)
    job = tiny_job(tiny_model(encoder=2, llm=14), request=LayoutRequest(tp=1, cp=1, dp=4))

    def stages(chunks: str, scheduler: Scheduler) -> list[int]:
        strategy = Strategy("dip", DipPlanner(chunks=chunks), DipAssigner(), scheduler)
        return [module.pp for module in strategy.plan(profile_of(job, shapes)).modules]

    dip, optimus = DipScheduler(search_rounds=0), OptimusScheduler()
    assert stages("rule", dip) == [2, 16]
    assert stages("auto", dip) == [2, 16]
    assert stages("one", dip) == stages("one", optimus) == stages("auto", optimus) == [2, 2]
    with pytest.raises(IncompatibleError, match="a rank holds 8 stages of llm"):
        stages("rule", optimus)


@pytest.mark.wide
def test_recomputation_is_taken_where_memory_would_starve_the_pipeline() -> None:
    shapes = samples(*[(1500, [4000])] * 8)
    layouts = {}
    for budget in (16.0, 0.0):
        job = tiny_job(MODEL, request=LayoutRequest(tp=1, cp=1, dp=2), budget_bytes=1e12)
        profile = profile_of(job, shapes)
        scheduler = DipScheduler(search_rounds=0, memory="module")
        strategy = Strategy("dip", DipPlanner(), DipAssigner(), scheduler)
        roomy = strategy.plan(profile)
        if not budget:
            alone = peak_activations(
                roomy, program_of(roomy, shapes, DipAssigner().assign(shapes, roomy, profile), 1.0)
            )
            need = (MEMORY.lane_state_bytes(roomy).max() + 1.3 * alone.max()) / PLANNING_SHARE
            job = tiny_job(MODEL, request=LayoutRequest(tp=1, cp=1, dp=2), budget_bytes=float(need))
            roomy = strategy.plan(profile_of(job, shapes))
        layouts[budget] = [module.recompute for module in roomy.modules]
    assert layouts[16.0] == [False, False]
    assert any(layouts[0.0])


@pytest.mark.wide
@pytest.mark.parametrize(("memory", "choices"), [("module", 4), ("greedy", 1)])
def test_candidates_are_timed_and_their_memory_is_checked_without_search(
    monkeypatch: pytest.MonkeyPatch, memory: str, choices: int
) -> None:
    rounds: list[int] = []
    original = DipScheduler.schedule

    def schedule(self: DipScheduler, *arguments: Any) -> Program:
        rounds.append(self.search_rounds)
        return original(self, *arguments)

    monkeypatch.setattr(DipScheduler, "schedule", schedule)
    job = tiny_job(MODEL, request=LayoutRequest(tp=1, cp=1, dp=2), budget_bytes=1e12)
    profile = profile_of(job, samples((10, [40, 40]), (100, [])))
    scheduler = DipScheduler(search_rounds=3, memory=memory)
    Strategy("dip", DipPlanner(chunks="one"), DipAssigner(), scheduler).plan(profile)
    # Where the scheduler chooses what is recomputed, the planner has no choices of it to time. Then memory is checked:
    # on some batches, for there is plenty.
    assert {*rounds} == {0}
    assert choices < len(rounds) < choices + MEMORY_BATCHES
