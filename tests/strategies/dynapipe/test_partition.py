"""DynaPipe's cuts against every way to cut, its costs by hand, and the whole assigner."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program.layout import Layout
from entrain_bench_strategies.dynapipe import DynaPipeAssigner
from entrain_bench_strategies.dynapipe.assigner import (
    Cuttable,
    SampleCosts,
    believed_costs,
    cuts_within,
    cuttable,
    earliest_starts,
)
from support.builders import (
    chain_layout,
    placed,
    profile_of,
    random_samples,
    rngs,
    samples,
    tiny_job,
    tiny_model,
)

MODEL = tiny_model()


def prefix(rows: list[list[int]]) -> IntArray:
    return np.array([[0, *np.cumsum(row)] for row in rows], np.int64)


def every_cut(count: int) -> list[IntArray]:
    return [np.array([0, *cut]) for size in range(count) for cut in combinations(range(1, count), size)]


def random_ranges(rng: np.random.Generator, count: int) -> Cuttable:
    stages, modules = int(rng.integers(1, 4)), int(rng.integers(1, 3))
    return Cuttable(
        prefix(rng.integers(0, 20, (stages, count)).tolist()),
        rng.integers(0, 6, (stages, modules)),
        prefix(rng.integers(0, 2, (modules, count)).tolist()),
        earliest_starts(
            prefix(rng.integers(1, 9, (2, count)).tolist()), rng.integers(5, 40, 2), int(rng.integers(1, count + 1))
        ),
        1.0,
    )


def allowed(ranges: Cuttable, starts: IntArray) -> bool:
    ends = [*starts[1:].tolist(), ranges.cost.shape[1] - 1]
    return all(ranges.earliest[end] <= start for start, end in zip(starts.tolist(), ends, strict=True))


@settings(max_examples=60, deadline=None)
@given(rngs, st.integers(1, 7), st.integers(1, 4), st.integers(1, 5))
def test_cuts_are_within_the_step_of_the_best_of_all(
    rng: np.random.Generator, count: int, dp: int, stages: int
) -> None:
    ranges = random_ranges(rng, count)
    best = min(ranges.estimate(cut, stages, dp) for cut in every_cut(count) if allowed(ranges, cut))
    for step in (0.001, 0.5):
        found = ranges.cut(stages, dp, step)
        assert allowed(ranges, found)
        # A limit is at least one unit above the one before.
        slack = max(step * best, (stages - 1) * 1.0)
        assert best <= ranges.estimate(found, stages, dp) <= best + slack + 1e-6


@settings(max_examples=60, deadline=None)
@given(rngs, st.integers(1, 7), st.integers(0, 60))
def test_under_a_limit_the_sum_is_the_least(rng: np.random.Generator, count: int, limit: int) -> None:
    ranges = random_ranges(rng, count)
    single = ranges.of_ranges(np.arange(count))
    limit = max(limit, int(single.max()))
    found = cuts_within(ranges.cost, ranges.fixed, ranges.present, ranges.earliest, limit)
    sums = [
        int(ranges.of_ranges(cut).sum())
        for cut in every_cut(count)
        if allowed(ranges, cut) and ranges.of_ranges(cut).max() <= limit
    ]
    assert ranges.of_ranges(found).max() <= limit
    assert int(ranges.of_ranges(found).sum()) == min(sums)


def module_s(costs: SampleCosts, owner: IntArray, count: int) -> FloatArray:
    """Forward seconds of each module in each of ``count`` microbatches, by that of each sample ``[modules, count]``."""
    rows = []
    for seconds, fixed, here in zip(costs.sample_s, costs.fixed_s, costs.present, strict=True):
        held = np.bincount(owner, weights=here, minlength=count) > 0
        rows.append(np.bincount(owner, weights=seconds, minlength=count) + fixed * held)
    return np.array(rows)


def test_memory_and_replicas_bound_a_range() -> None:
    held = prefix([[3, 3, 3, 9, 3]])
    # Up to 6 of memory; 9 alone is a range all the same.
    assert earliest_starts(held, np.array([6]), 5).tolist() == [0, 0, 0, 1, 3, 4]
    assert earliest_starts(held, np.array([99]), 2).tolist() == [0, 0, 0, 1, 2, 3]


def test_a_microbatch_costs_what_its_samples_take_and_what_it_takes_once() -> None:
    shapes = samples((10, [40, 80]), (20, []), (30, [40]))
    layout, job = chain_layout(MODEL, 1, 2, 3), tiny_job(MODEL)
    profile = profile_of(job, shapes)
    costs = believed_costs(profile, shapes, layout)
    vision, llm = MODEL.modules
    for index, module in enumerate((vision, llm)):
        alone = profile.estimates.units(module, shapes, 1, 1)
        units = module.units(shapes)
        # A unit alone is its part and what a microbatch takes once.
        each = np.bincount(module.owners(shapes, units), alone - costs.fixed_s[index], minlength=3)
        np.testing.assert_allclose(costs.sample_s[index], each, rtol=1e-9)
    assert costs.present.tolist() == [[True, False, True], [True, True, True]]
    together = module_s(costs, np.array([0, 0, 1]), 2)
    np.testing.assert_allclose(together[1], [*(costs.sample_s[1, :2].sum(),), costs.sample_s[1, 2]] + costs.fixed_s[1])
    # The encoder's stage, then the LLM's two, which share its layers; a backward is two forwards.
    np.testing.assert_allclose(costs.forward.sum(axis=0), [1.0, 1.0])
    assert costs.forward[:, 0].tolist() == [1.0, 0.0, 0.0]
    np.testing.assert_allclose(costs.backward, 2 * costs.forward)


def test_the_slowest_stage_counts_and_dominated_ones_do_not() -> None:
    shapes = random_samples(np.random.default_rng(3), 24)
    layout = chain_layout(MODEL, 2, 2, 12, dp=2)
    profile = profile_of(tiny_job(MODEL), shapes)
    costs = believed_costs(profile, shapes, layout)
    ranges = cuttable(costs, np.arange(24), 2)
    starts = np.array([0, 5, 11, 20])
    owner = np.searchsorted(starts, np.arange(24), side="right") - 1
    weight = costs.forward + costs.backward
    every_stage = (weight[:, :, None] * module_s(costs, owner, 4)[None]).sum(axis=1).max(axis=0)
    np.testing.assert_allclose(ranges.of_ranges(starts) * ranges.unit_s, every_stage, rtol=1e-9)


@settings(max_examples=25, deadline=None)
@given(rngs, st.sampled_from(["encoder", "arrival"]), st.integers(1, 3))
def test_every_sample_once_in_cuts_of_the_order(rng: np.random.Generator, order: str, dp: int) -> None:
    shapes = random_samples(rng, 12 * dp)
    layout = chain_layout(MODEL, 1, 2, 6, dp=dp)
    profile = profile_of(tiny_job(MODEL), shapes)
    vision, llm = DynaPipeAssigner(order).assign(shapes, layout, profile).modules
    assert vision.microbatch.tolist() == llm.microbatch[shapes.item_sample].tolist()
    assert vision.replica.tolist() == llm.replica[shapes.item_sample].tolist()
    for replica in range(dp):
        places = np.unique(llm.microbatch[llm.replica == replica])
        assert places.tolist() == [*range(len(places))]
        assert len(places)
    if order == "arrival":
        # Microbatches are ranges.
        label = llm.microbatch * dp + llm.replica
        assert np.count_nonzero(np.diff(label)) == len(np.unique(label)) - 1


def test_modules_of_different_dp_are_refused() -> None:
    vision, llm = MODEL.modules
    layout = Layout((placed(vision, [[[0]], [[1]]]), placed(llm, [[[2]]])), 2)
    shapes = samples((10, [40]), (20, [40]))
    with pytest.raises(IncompatibleError, match="all modules need the same DP"):
        DynaPipeAssigner().assign(shapes, layout, profile_of(tiny_job(MODEL), shapes))
