"""Transfers that queue for links: by hand, against slow references, and under the cost truth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.base.arrays import FloatArray, IntArray, offsets_from_counts, rows_of
from entrain_bench.base.errors import DeadlockError
from entrain_bench.costs.edges import LinkTransfers
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program import Pass, Program
from entrain_bench.program.assignment import same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.simulate import place_actions
from support.builders import (
    StuckError,
    as_ints,
    no_delay,
    placed,
    reference_times,
    samples,
    tiny_cluster,
    tiny_model,
)
from support.programs import LAYOUTS, assert_cycle_is_real, handmade_layout, random_program, random_times, swap_entries

MODEL = tiny_model(encoder=2, llm=2)


def crossing(program: Program) -> IntArray:
    """Dependencies between modules."""
    return np.flatnonzero(program.module[program.dep_actions] != program.module[rows_of(program.dep_offsets)])


def relay_of(program: Program, link_s: float | FloatArray) -> LinkTransfers:
    """A gather and a scatter by microbatch and direction, one dependency at a time ``[gathers]``."""
    targets = rows_of(program.dep_offsets)
    labels: dict[int, tuple[int, Pass]] = {}
    for edge in crossing(program).tolist():
        target = program.view(int(targets[edge]))
        ends = (target, program.view(int(program.dep_actions[edge])))
        (llm,) = (view for view in ends if view.module == "llm")
        labels[edge] = (llm.microbatch, target.kind)
    names = sorted(set(labels.values()))
    count, gather = len(names), np.full(len(program.dep_actions), -1)
    gather[list(labels)] = [names.index(label) for label in labels.values()]
    return LinkTransfers(
        first=gather,
        last=np.where(gather >= 0, gather + count, -1),
        follows=as_ints([-1] * count + [*range(count)]),
        link_s=np.tile(np.broadcast_to(np.asarray(link_s, np.float64), count), 2),
        link_offsets=np.arange(2 * count + 1),
        links=as_ints([0] * count + [1] * count),
        num_links=2,
    )


def gathered(program: Program, relay: LinkTransfers) -> Program:
    """The program whose actions wait for all sources of the transfers they need."""
    rows = []
    for action in range(program.num_actions):
        row = slice(program.dep_offsets[action], program.dep_offsets[action + 1])
        shared = np.isin(relay.first, relay.first[row]) & (relay.first >= 0)
        rows.append(np.union1d(program.dep_actions[row], program.dep_actions[shared]))
    return replace(program, dep_offsets=offsets_from_counts(as_ints(map(len, rows))), dep_actions=np.concatenate(rows))


def relayed_reference(
    program: Program, duration: FloatArray, delay: FloatArray, relay: LinkTransfers, contention: bool = True
) -> tuple[list[float], list[float], list[float]]:
    """Times by repetition: place actions with the arrivals found so far, then serve transfers by readiness.

    The transfer served k-th is right after k rounds, for nothing that it waits for comes later.
    """
    extra, count = np.zeros(len(delay)), len(relay) // 2
    for _ in range(count + 2):
        start, end, wait = reference_times(program, duration, delay + extra)
        done = np.array(end)[program.dep_actions]
        ready = [float(done[relay.first == number].max()) for number in range(count)]
        gathered_at, arrival = np.zeros(count), np.zeros(count)
        for begin, done_at in ((ready, gathered_at), (gathered_at, arrival)):
            free = -np.inf
            for number in sorted(range(count), key=lambda number: (begin[number], number)):
                free = (
                    max(free, begin[number]) + relay.link_s[number]
                    if contention
                    else begin[number] + relay.link_s[number]
                )
                done_at[number] = free
        before, extra = extra, np.where(relay.first >= 0, arrival[relay.first] - done, 0.0)
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
        count = len(relay_of(program, 0.0)) // 2
        if not count:
            continue
        relay = relay_of(program, rng.integers(0, 9, count).astype(np.float64))
        delay[relay.first >= 0] = 0.0
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
    assert direct.transfers is None
    assert prices.transfers is not None
    tier = cluster.group_tier(np.arange(4))
    # 40 + 80 and 120 + 160 encoder tokens; 4 of them make one LLM token of 128 bf16 values. Forward, then backward.
    expected = [tier.latency_s + size / tier.bandwidth_bytes_per_s for size in (7680, 7680, 17920, 17920)]
    assert prices.transfers.link_s == pytest.approx(expected * 2, rel=1e-12)
    edges, wanted = crossing(program), relay_of(program, 0.0)
    for name in ("first", "last", "follows", "link_offsets", "links", "num_links"):
        assert np.array_equal(getattr(prices.transfers, name), getattr(wanted, name)), name
    assert np.all(prices.delay_s[edges] == 0.0)
    assert not prices.hold_s.any()
    others = np.setdiff1d(np.arange(len(prices.delay_s)), edges)
    assert np.array_equal(prices.delay_s[others], direct.delay_s[others])


# Links of every rank
