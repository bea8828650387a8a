"""DynaPipe's cuts and cycles: by hand, against brute force, and where they do not fit."""

from __future__ import annotations

from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.schedules import chain_program, one_f_one_b, stages_behind
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.costs.memory import Memory
from entrain_bench.program.assignment import Assignment, same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.program.validate import check_program
from entrain_bench.simulate import place_actions
from entrain_bench_strategies.dynapipe import (
    CLASSES,
    Cuttable,
    DynaPipeAssigner,
    DynaPipeScheduler,
    PassOrder,
    SampleCosts,
    _pipelines,
    believed_costs,
    cuts_within,
    cuttable,
    cyclic_order,
    earliest_starts,
    entries,
    time_classes,
)
from support.builders import (
    chain_layout,
    durations,
    labels,
    makespan,
    no_delay,
    passes,
    placed,
    profile_of,
    random_samples,
    rngs,
    samples,
    tiny_job,
    tiny_model,
)

MODEL = tiny_model()
FREE = 10**6


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
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("entrain_bench_strategies.dynapipe.LIMIT_STEP", step)
            found = ranges.cut(stages, dp)
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


def test_a_range_holds_what_all_its_stages_have_in_flight() -> None:
    # Two stages: a range of samples that keep 10 takes 20 for each of 40 on the first, and 10 running on the second.
    kept, working = np.array([[10.0] * 4, [0.0] * 4]), np.array([[0.0] * 4, [10.0] * 4])
    one, share = np.ones((1, 4)), np.ones((2, 1))
    costs = SampleCosts(one, np.zeros(1), one > 0, share, 2 * share, kept, working, np.full(2, 40.0))
    assert cuttable(costs, np.arange(4), 1).earliest.tolist() == [0, 0, 0, 1, 2]


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


def order_of(
    forward_s: FloatArray, backward_s: FloatArray, kept: FloatArray, room: FloatArray, flying: IntArray
) -> PassOrder:
    return PassOrder(*cyclic_order(np.arange(len(forward_s)), forward_s, backward_s, kept, room, flying))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 9))
def test_with_one_microbatch_in_flight_for_each_stage_from_here_on_it_is_1f1b(stages: int, count: int) -> None:
    ones = np.ones((count, stages))
    order = order_of(ones, 2 * ones, ones, np.full(stages, np.inf), np.arange(stages, 0, -1))
    behind = np.arange(stages - 1, -1, -1)
    forward, backward = one_f_one_b(np.arange(count)[:, None], np.array(count), behind)
    assert order.forward.tolist() == forward.tolist()
    assert order.backward.tolist() == backward.tolist()
    assert order.peak_bytes.tolist() == [min(count, one) for one in range(stages, 0, -1)]


@settings(max_examples=60, deadline=None)
@given(rngs, st.integers(1, 5), st.integers(1, 8))
def test_forwards_wait_for_memory(rng: np.random.Generator, stages: int, count: int) -> None:
    kept = rng.integers(1, 9, (count, stages)).astype(np.float64)
    room = rng.integers(5, 25, stages).astype(np.float64)
    seconds = rng.random((2, count, stages))
    order = order_of(*seconds, kept, room, np.full(stages, FREE))
    for stage in range(stages):
        slots = np.concatenate((order.forward[:, stage], order.backward[:, stage]))
        assert sorted(slots.tolist()) == [*range(2 * count)]
        steps = np.zeros(2 * count)
        steps[order.forward[:, stage]] = kept[:, stage]
        steps[order.backward[:, stage]] = -kept[:, stage]
        held = steps.cumsum()
        assert order.peak_bytes[stage] == pytest.approx(held.max())
        # Only what is alone may be more than there is room for.
        assert held.max() <= max(room[stage], kept[:, stage].max()) + 1e-9


def test_the_believed_makespan_is_the_simulated_one_and_no_longer_than_that_of_1f1b() -> None:
    rng = np.random.default_rng(7)
    shapes = random_samples(rng, 24)
    layout = chain_layout(MODEL, 2, 2, 6, dp=2)
    profile = profile_of(tiny_job(MODEL), shapes)
    assignment = DynaPipeAssigner().assign(shapes, layout, profile)
    program = DynaPipeScheduler().schedule(shapes, layout, assignment, profile)
    check_program(program)
    seconds = np.zeros(program.num_actions)
    behind = stages_behind(layout, 1)
    pipelines = _pipelines(program, behind, profile)
    for index, rows in enumerate(program.chunks):
        at = rows.replica[:, None], rows.microbatch[:, None], 3 - behind[index]
        seconds[program.forward_actions(index)] = pipelines.forward_s[at]
        seconds[program.backward_actions(index)] = pipelines.backward_s[at]
    _, end, _ = place_actions(program, seconds, no_delay(program))
    for replica in range(2):
        count = 1 + int(program.chunks[-1].microbatch[program.chunks[-1].replica == replica].max())
        best = pipelines.fastest(replica, count, True)[1]
        mine = (program.replica == replica) & (program.chunk >= 0)
        assert end[mine].max() == pytest.approx(best.makespan_s)
        costs = pipelines.forward_s[replica], pipelines.backward_s[replica], pipelines.kept_bytes[replica]
        plain = cyclic_order(np.arange(count), *costs, np.full(4, np.inf), np.arange(4, 0, -1))
        assert best.makespan_s <= PassOrder(*plain).makespan_s


def test_memory_brings_the_program_down_to_what_there_is() -> None:
    # So long that activations are far above states.
    shapes = samples(*[(8000, [20000])] * 8)
    microbatch = np.arange(8)
    assignment = same_microbatches(MODEL, shapes, 0 * microbatch, microbatch, microbatch)
    layout, memory = chain_layout(MODEL, 2, 2, 8), Memory(MODEL)
    plain = chain_program(MODEL, shapes, layout, assignment, stages_behind(layout))
    least = float(memory.peak_bytes(plain).max())

    def peak(budget_bytes: float) -> float:
        profile = profile_of(tiny_job(MODEL, budget_bytes=budget_bytes), shapes)
        return float(memory.peak_bytes(DynaPipeScheduler().schedule(shapes, layout, assignment, profile)).max())

    assert least <= peak(1.2 * least / 0.95) <= 1.2 * least
    # Nothing fits: 1F1B, which needs least.
    assert peak(1.0) == least


def test_orders_of_classes_are_all_tried() -> None:
    found = [order.tolist() for order in entries(np.array([1.0, 9.0, 1.0, 5.0]))]
    groups = [[0, 2], [3], [1]]
    assert found == [[0, 1, 2, 3], *([*one, *two, *three] for one, two, three in permutations(groups))]
    assert len([*entries(np.ones(5))]) == 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.001, 10.0), min_size=1, max_size=12).map(np.array))
def test_classes_are_of_neighbouring_times(seconds: FloatArray) -> None:
    found = time_classes(seconds)
    assert len(np.unique(found)) <= CLASSES
    by_time = found[np.argsort(seconds, kind="stable")]
    assert np.all(np.diff(by_time) >= 0)


def test_deferred_samples_keep_their_order() -> None:
    # The LLM takes sample 0 a microbatch later than the encoder: nothing may enter in another order.
    shapes = samples(*[(10, [40])] * 3, (10, [400]))
    assignment = Assignment((labels([0] * 4, [0, 1, 2, 3]), labels([0] * 4, [1, 1, 2, 3])))
    layout = chain_layout(MODEL, 1, 2, 4)
    program = DynaPipeScheduler().schedule(shapes, layout, assignment, profile_of(tiny_job(MODEL), shapes))
    check_program(program)
    _, end, _ = place_actions(program, durations(program, lambda view: float(len(view.members))), no_delay(program))
    assert makespan(program, end) > 0
    forwards = [step for step in passes(program, 0) if " F" in step]
    assert forwards == [f"vision F{m}" for m in range(4)]
