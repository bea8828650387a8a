"""The search of orders: what it tries, how long it may, and that it never gets worse."""

from __future__ import annotations

import numpy as np
import pytest

from entrain_bench.balancing.chunk_estimates import packed_iteration_s
from entrain_bench_strategies.braid import BraidAssigner, BraidScheduler
from entrain_bench_strategies.braid.scheduler import (
    Search,
    afforded_rollouts,
    first_choices,
    improve,
    split_replicas,
)
from support.braid import BRAID, assigned_in_chunks, layout_of, profile_for, shape

PLAIN = BraidScheduler(llm_leads=(0,), holds=(0,))


def searched(rollouts: int, leads: tuple[int, ...] = (0, 1000)) -> list[float]:
    profile = profile_for()
    layout = layout_of(profile, shape(encoder_tp=1, segments=2))
    shapes = profile.samples.draw(32)
    assignment = assigned_in_chunks(shapes, layout, profile)
    program = BraidScheduler(rollouts=0).schedule(shapes, layout, assignment, profile)
    searches = [
        Search(replica, BraidScheduler(llm_leads=leads, holds=(0,)))
        for replica in split_replicas(program, assignment, profile)
    ]
    improve(searches, rollouts)
    return [one.end_s for one in searches]


def test_more_rollouts_are_never_slower_and_go_to_the_slowest() -> None:
    ends = np.array([searched(rollouts) for rollouts in (0, 8, 64)])
    assert np.all(np.diff(ends.max(axis=1)) <= 0)
    assert ends[2].max() < ends[0].max()
    assert searched(64) == ends[2].tolist()
    # One rollout is one replica's.
    assert np.count_nonzero(np.array(searched(1)) != ends[0]) <= 1


def test_rollouts_take_a_tenth_of_an_iteration_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = profile_for()
    layout = layout_of(profile, shape(encoder_tp=1, segments=2))
    shapes = profile.samples.draw(32)
    assignment = BraidAssigner().assign(shapes, layout, profile)
    program = BraidScheduler(rollouts=0).schedule(shapes, layout, assignment, profile)
    searches = [Search(replica, PLAIN) for replica in split_replicas(program, assignment, profile)]
    longest_s, most = max(one.end_s for one in searches), max(len(one.replica.numbers) for one in searches)
    assert afforded_rollouts(searches) == int(0.1 * longest_s / (0.5e-6 * most))
    # Where an action takes as long as the iteration no rollout is afforded: the first schedule stays.
    monkeypatch.setattr("entrain_bench_strategies.braid.scheduler.ACTION_S", longest_s)
    assert np.array_equal(
        BraidScheduler(rollouts=64).schedule(shapes, layout, assignment, profile).lane_actions, program.lane_actions
    )


def test_seeds_are_orders_of_all_groups() -> None:
    profile = profile_for()
    layout = layout_of(profile, shape())
    shapes = profile.samples.draw(32)
    assignment = BraidAssigner().assign(shapes, layout, profile)
    program = BraidScheduler(rollouts=0).schedule(shapes, layout, assignment, profile)
    for replica in split_replicas(program, assignment, profile):
        for choice in first_choices(replica, PLAIN):
            assert sorted(choice.order) == [*range(len(replica.load_s))]


def test_what_it_believes_is_about_what_it_takes() -> None:
    profile = profile_for()
    shapes = profile.samples.draw(32)
    program = BRAID.program(shapes, layout_of(profile, shape(encoder_tp=1, segments=2)), profile)
    assert packed_iteration_s(program, profile) == pytest.approx(profile.trial_s(program), rel=0.1)
