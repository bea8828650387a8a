"""The single rank between modules: its transfers by hand, against a slow reference, and under the cost truth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from entrain_bench.arrays import FloatArray, IntArray, offsets_from_counts, rows_of
from entrain_bench.costs.relay import Relay
from entrain_bench.costs.truth import CostTruth
from entrain_bench.errors import DeadlockError
from entrain_bench.program import Pass, Program
from entrain_bench.program.assignment import same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.simulate import Simulator, place_actions
from entrain_bench.strategy.schedules import chain_program, stages_behind
from support.builders import (
    StuckError,
    as_ints,
    chain_layout,
    durations,
    find,
    no_delay,
    placed,
    reference_times,
    samples,
    tiny_cluster,
    tiny_model,
    uniform_batch,
)
from support.programs import LAYOUTS, assert_cycle_is_real, handmade_layout, random_program, random_times, swap_entries

MODEL = tiny_model(encoder=2, llm=2)


def crossing(program: Program) -> IntArray:
    """Dependencies between modules."""
    return np.flatnonzero(program.module[program.dep_actions] != program.module[rows_of(program.dep_offsets)])


def relay_of(program: Program, link_s: float) -> Relay:
    """Transfers by microbatch and direction, one dependency at a time; all take the same."""
    targets = rows_of(program.dep_offsets)
    labels: dict[int, tuple[int, Pass]] = {}
    for edge in crossing(program).tolist():
        target = program.view(int(targets[edge]))
        ends = (target, program.view(int(program.dep_actions[edge])))
        (llm,) = (view for view in ends if view.module == "llm")
        labels[edge] = (llm.microbatch, target.kind)
    names = sorted(set(labels.values()))
    transfer = np.full(len(program.dep_actions), -1)
    transfer[list(labels)] = [names.index(label) for label in labels.values()]
    return Relay(transfer, np.full(len(names), link_s))


def chain_of(num_microbatches: int) -> Program:
    layout = chain_layout(MODEL, 1, 1, num_microbatches)
    shapes, assignment = uniform_batch(MODEL, num_microbatches)
    return chain_program(MODEL, shapes, layout, assignment, stages_behind(layout))


def test_transfers_of_two_microbatches_take_turns() -> None:
    program = chain_of(2)
    relay = relay_of(program, 6.0)
    start, end, wait = place_actions(program, durations(program, lambda _: 1.0), no_delay(program), relay)
    # encoder: F0 0-1, F1 1-2; LLM: F0 B0 F1 B1
    # in:  0 1-7   1 7-13            back 0 15-21   back 1 21-27
    # out:         0 7-13   1 13-19                 back 0 21-27   back 1 27-33
    assert [start[find(program, "llm", Pass.FORWARD, 0, [k])] for k in (0, 1)] == [13.0, 19.0]
    assert [wait[find(program, "llm", Pass.FORWARD, 0, [k])] for k in (0, 1)] == [12.0, 4.0]
    assert [start[find(program, "vision", Pass.BACKWARD, 0, [k])] for k in (0, 1)] == [27.0, 33.0]
    assert end.max() == 34.0


def test_forward_and_backward_transfers_share_both_directions() -> None:
    program = chain_of(2)
    relay = relay_of(program, 6.0)
    took = durations(program, lambda view: 10.0 if view.module == "vision" else 1.0)
    start, end, wait = place_actions(program, took, no_delay(program), relay)
    # encoder: F0 0-10, F1 10-20; LLM: F0 22-23, B0 23-24, F1 32-33, B1 33-34
    # in:  0 10-16          1 20-26          back 0 26-32 (ready at 24)   back 1 34-40
    # out:         0 16-22          1 26-32  back 0 32-38                 back 1 40-46
    assert start[find(program, "llm", Pass.FORWARD, 0, [1])] == 32.0
    first, second = (find(program, "vision", Pass.BACKWARD, 0, [k]) for k in (0, 1))
    assert (start[first], wait[first]) == (38.0, 14.0)
    assert (start[second], wait[second]) == (48.0, 0.0)
    assert end.max() == 58.0


def test_a_gather_starts_when_the_last_replica_is_done() -> None:
    layout = Layout((placed(MODEL.modules[0], [[[0]], [[1]]]), placed(MODEL.modules[1], [[[2]], [[3]]])), 1)
    shapes, assignment = uniform_batch(MODEL, 1, dp=2)
    program = chain_program(MODEL, shapes, layout, assignment, stages_behind(layout))
    took = durations(program, lambda view: 5.0 if (view.module, view.replica) == ("vision", 1) else 1.0)
    start, _, wait = place_actions(program, took, no_delay(program), relay_of(program, 2.0))
    replicas = [find(program, "llm", Pass.FORWARD, 0, [k], replica=k) for k in (0, 1)]
    assert start[replicas].tolist() == [9.0, 9.0]
    assert wait[replicas].tolist() == [8.0, 4.0]


def gathered(program: Program, relay: Relay) -> Program:
    """The program whose actions wait for all sources of the transfers they need."""
    rows = []
    for action in range(program.num_actions):
        row = slice(program.dep_offsets[action], program.dep_offsets[action + 1])
        shared = np.isin(relay.transfer, relay.transfer[row]) & (relay.transfer >= 0)
        rows.append(np.union1d(program.dep_actions[row], program.dep_actions[shared]))
    return replace(program, dep_offsets=offsets_from_counts(as_ints(map(len, rows))), dep_actions=np.concatenate(rows))


def relayed_reference(
    program: Program, duration: FloatArray, delay: FloatArray, relay: Relay, contention: bool = True
) -> tuple[list[float], list[float], list[float]]:
    """Times by repetition: place actions with the arrivals found so far, then serve transfers by readiness.

    The transfer served k-th is right after k rounds, for nothing that it waits for comes later.
    """
    extra = np.zeros(len(delay))
    for _ in range(len(relay.link_s) + 2):
        start, end, wait = reference_times(program, duration, delay + extra)
        done = np.array(end)[program.dep_actions]
        ready = [float(done[relay.transfer == number].max()) for number in range(len(relay.link_s))]
        arrival = np.zeros(len(ready))
        received = sent = -np.inf
        for number in sorted(range(len(ready)), key=lambda number: (ready[number], number)):
            received = max(received, ready[number]) + relay.link_s[number]
            sent = max(sent, received) + relay.link_s[number]
            arrival[number] = sent if contention else ready[number] + 2 * relay.link_s[number]
        before, extra = extra, np.where(relay.transfer >= 0, arrival[relay.transfer] - done, 0.0)
        if np.array_equal(before, extra):
            return start, end, wait
    raise AssertionError("no fixed point")


def test_random_programs_run_like_the_reference_or_deadlock_with_it() -> None:
    stuck_count = contended = 0
    names = list(LAYOUTS)
    for seed in range(120):
        rng = np.random.default_rng(seed)
        program = random_program(rng, handmade_layout(names[seed % len(names)]))
        if seed % 3 == 0:
            program = swap_entries(rng, program, 1)
        duration, delay = random_times(rng, program)
        relay = relay_of(program, 0.0)
        if not len(relay.link_s):
            continue
        relay = replace(relay, link_s=rng.integers(0, 9, len(relay.link_s)).astype(np.float64))
        delay[relay.transfer >= 0] = 0.0
        together = gathered(program, relay)
        try:
            reference_times(together, duration, no_delay(together))
        except StuckError as stuck:
            stuck_count += 1
            with pytest.raises(DeadlockError) as error:
                place_actions(program, duration, delay, relay)
            assert_cycle_is_real(together, str(error.value), stuck)
            continue
        found = place_actions(program, duration, delay, relay)
        for name, ours, theirs in zip(
            ("start", "end", "wait"), found, relayed_reference(program, duration, delay, relay), strict=True
        ):
            assert np.array_equal(ours, theirs), (seed, name)
        alone = relayed_reference(program, duration, delay, relay, contention=False)
        assert np.all(found[0] >= np.array(alone[0])), seed
        contended += bool(np.any(found[0] > np.array(alone[0])))
    assert stuck_count >= 20
    assert contended >= 20


def test_an_infinitely_fast_rank_only_makes_transfers_wait_for_all_their_sources() -> None:
    checked = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        program = random_program(rng, handmade_layout("disjoint, encoder dp 1, llm dp 2"))
        relay = relay_of(program, 0.0)
        duration, _ = random_times(rng, program)
        together = gathered(program, relay)
        try:
            expected = place_actions(together, duration, no_delay(together))
        except DeadlockError:
            continue
        found = place_actions(program, duration, no_delay(program), relay)
        assert np.array_equal(found[0], expected[0])
        assert np.array_equal(found[1], expected[1])
        checked += 1
    assert checked >= 10


# Under the cost truth


def boundary_program(single: bool) -> Program:
    places = (placed(MODEL.modules[0], [[[0]], [[1]]]), placed(MODEL.modules[1], [[[2]], [[3]]]))
    layout = Layout(places, 2, single_rank_boundary=single)
    shapes = samples((10, [40]), (10, [80]), (10, [120]), (10, [160]))
    replica, microbatch = as_ints([0, 1, 0, 1]), as_ints([0, 0, 1, 1])
    assignment = same_microbatches(MODEL, shapes, replica, microbatch, microbatch)
    return chain_program(MODEL, shapes, layout, assignment, stages_behind(layout))


def test_a_transfer_carries_a_microbatch_of_all_replicas_over_the_slowest_tier() -> None:
    cluster = tiny_cluster(1, 8)
    truth = CostTruth(MODEL, cluster)
    program = boundary_program(single=True)
    prices, direct = truth.price(program), truth.price(boundary_program(single=False))
    assert direct.relay is None
    assert prices.relay is not None
    tier = cluster.group_tier(np.arange(4))
    # 40 + 80 and 120 + 160 encoder tokens; 4 of them make one LLM token of 128 bf16 values. Forward, then backward.
    expected = [tier.latency_s + size / tier.bandwidth_bytes_per_s for size in (7680, 7680, 17920, 17920)]
    assert prices.relay.link_s == pytest.approx(expected, rel=1e-12)
    edges = crossing(program)
    assert np.array_equal(prices.relay.transfer[edges], relay_of(program, 0.0).transfer[edges])
    assert np.all(prices.delay_s[edges] == 0.0)
    others = np.setdiff1d(np.arange(len(prices.delay_s)), edges)
    assert np.all(prices.relay.transfer[others] == -1)
    assert np.array_equal(prices.delay_s[others], direct.delay_s[others])


def test_modules_on_the_same_rank_need_no_transfer() -> None:
    layout = replace(handmade_layout("one rank for all"), single_rank_boundary=True)
    shapes, assignment = uniform_batch(MODEL, 2)
    program = chain_program(MODEL, shapes, layout, assignment, stages_behind(layout))
    relay = CostTruth(MODEL, tiny_cluster()).price(program).relay
    assert relay is not None
    assert len(relay.link_s) == 0
    Simulator(CostTruth(MODEL, tiny_cluster()), 1e12).execute(program)


def test_the_simulator_charges_the_relay() -> None:
    simulator = Simulator(CostTruth(MODEL, tiny_cluster()), 1e12)
    program = boundary_program(single=True)
    prices = simulator.truth.price(program)
    assert prices.relay is not None
    timeline = simulator.execute(program)
    start, end, wait = relayed_reference(program, prices.duration_s, prices.delay_s, prices.relay)
    assert timeline.start_s == pytest.approx(start, rel=1e-12)
    assert timeline.end_s == pytest.approx(end, rel=1e-12)
    assert timeline.transfer_wait_s == pytest.approx(wait, rel=1e-9, abs=1e-15)
    assert timeline.iteration_time_s > simulator.execute(boundary_program(single=False)).iteration_time_s
