"""DynaPipe's schedules: cycles by hand, 1F1B as a special case, memory, and the order that is believed fastest."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.schedules import one_f_one_b, stages_behind
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.costs.memory import Memory
from entrain_bench.program import Pass, Program
from entrain_bench.program.assignment import Assignment, same_microbatches
from entrain_bench.program.validate import check_program
from entrain_bench.simulate import place_actions
from entrain_bench_strategies.dynapipe import DynaPipeAssigner, DynaPipeScheduler
from entrain_bench_strategies.dynapipe.scheduler import PassOrder, _pipelines, cyclic_order, entries, time_classes
from support.builders import (
    chain_layout,
    durations,
    labels,
    makespan,
    no_delay,
    passes,
    profile_of,
    random_samples,
    rngs,
    samples,
    tiny_job,
    tiny_model,
)

MODEL = tiny_model()
FREE = 10**6


def order_of(
    forward_s: FloatArray, backward_s: FloatArray, kept: FloatArray, room: FloatArray, flying: IntArray
) -> PassOrder:
    return PassOrder(*cyclic_order(np.arange(len(forward_s)), forward_s, backward_s, kept, room, flying))


def unlimited(count: int, stages: int, flying: IntArray | None = None) -> PassOrder:
    ones = np.ones((count, stages))
    most = np.full(stages, FREE) if flying is None else flying
    return order_of(ones, 2 * ones, ones, np.full(stages, np.inf), most)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 9))
def test_with_one_microbatch_in_flight_for_each_stage_from_here_on_it_is_1f1b(stages: int, count: int) -> None:
    order = unlimited(count, stages, np.arange(stages, 0, -1))
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


def chunk_seconds(program: Program) -> FloatArray:
    """A second for every member of a forward, two in a backward."""
    times = {Pass.FORWARD: 1.0, Pass.BACKWARD: 2.0}
    return durations(program, lambda view: times[view.kind] * len(view.members))


def test_the_believed_makespan_is_the_simulated_one() -> None:
    rng = np.random.default_rng(7)
    shapes = random_samples(rng, 24)
    layout = chain_layout(MODEL, 2, 2, 6, dp=2)
    profile = profile_of(tiny_job(MODEL), shapes)
    assignment = DynaPipeAssigner().assign(shapes, layout, profile)
    ends = {}
    for method in ("1f1b", "cyclic", "dynamic"):
        program = DynaPipeScheduler(method=method).schedule(shapes, layout, assignment, profile)
        check_program(program)
        seconds = np.zeros(program.num_actions)
        behind = stages_behind(layout, 1)
        pipelines = _pipelines(program, behind, profile)
        for index, rows in enumerate(program.chunks):
            place = pipelines.num_stages - 1 - behind[index]
            at = rows.replica[:, None], rows.microbatch[:, None], place
            seconds[program.forward_actions(index)] = pipelines.forward_s[at]
            seconds[program.backward_actions(index)] = pipelines.backward_s[at]
        _, end, _ = place_actions(program, seconds, no_delay(program))
        ends[method] = [float(end[(program.replica == replica) & (program.chunk >= 0)].max()) for replica in range(2)]
    for replica in range(2):
        assert ends["dynamic"][replica] == pytest.approx(min(ends["1f1b"][replica], ends["cyclic"][replica]))


def test_memory_brings_the_program_down_to_what_there_is() -> None:
    # So long that activations are far above states.
    shapes = samples(*[(8000, [20000])] * 8)
    microbatch = np.arange(8)
    assignment = same_microbatches(MODEL, shapes, 0 * microbatch, microbatch, microbatch)
    layout, memory = chain_layout(MODEL, 2, 2, 8), Memory(MODEL)

    def peak(method: str, budget_bytes: float) -> float:
        profile = profile_of(tiny_job(MODEL, budget_bytes=budget_bytes), shapes)
        program = DynaPipeScheduler(method=method).schedule(shapes, layout, assignment, profile)
        return float(memory.peak_bytes(program).max())

    most, least = peak("cyclic", 1e12), peak("1f1b", 1e12)
    assert least < 0.8 * most
    between = (least + most) / 2
    assert least <= peak("cyclic", between / 0.95) <= between
    # Nothing fits: 1F1B, which needs least.
    assert peak("dynamic", 1.0) == least


def test_orders_of_classes_are_all_tried() -> None:
    found = [order.tolist() for order in entries(np.array([1.0, 9.0, 1.0, 5.0]), 3)]
    groups = [[0, 2], [3], [1]]
    assert found == [[0, 1, 2, 3], *([*one, *two, *three] for one, two, three in permutations(groups))]
    assert len([*entries(np.ones(5), 3)]) == 1
    assert len([*entries(np.arange(5.0), 1)]) == 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.001, 10.0), min_size=1, max_size=12).map(np.array), st.integers(1, 4))
def test_classes_are_of_neighbouring_times(seconds: FloatArray, classes: int) -> None:
    found = time_classes(seconds, classes)
    assert len(np.unique(found)) <= classes
    by_time = found[np.argsort(seconds, kind="stable")]
    assert np.all(np.diff(by_time) >= 0)


def test_deferred_samples_keep_their_order() -> None:
    # The LLM takes sample 0 a microbatch later than the encoder: nothing may enter in another order.
    shapes = samples(*[(10, [40])] * 3, (10, [400]))
    assignment = Assignment((labels([0] * 4, [0, 1, 2, 3]), labels([0] * 4, [1, 1, 2, 3])))
    layout = chain_layout(MODEL, 1, 2, 4)
    program = DynaPipeScheduler().schedule(shapes, layout, assignment, profile_of(tiny_job(MODEL), shapes))
    check_program(program)
    _, end, _ = place_actions(program, chunk_seconds(program), no_delay(program))
    assert makespan(program, end) > 0
    forwards = [step for step in passes(program, 0) if " F" in step]
    assert forwards == [f"vision F{m}" for m in range(4)]
