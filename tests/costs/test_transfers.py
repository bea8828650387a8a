"""Transfers that queue for links: against a slow reference, with its deadlocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from entrain_bench.base.arrays import FloatArray, IntArray, offsets_from_counts, rows_of
from entrain_bench.base.errors import DeadlockError
from entrain_bench.costs.edges import LinkTransfers
from entrain_bench.program import Pass, Program
from entrain_bench.simulate import place_actions
from support.builders import (
    StuckError,
    as_ints,
    no_delay,
    reference_times,
)
from support.programs import LAYOUTS, assert_cycle_is_real, handmade_layout, random_program, random_times, swap_entries


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
