"""List schedules: by hand, valid and within memory, and against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.listing import ListedActions
from support.braid import Row, actions_of, most_held, orders, scheduled, timed

F, B = False, True


def test_a_backward_follows_the_first_forward() -> None:
    # Two pairs on one lane, in turn from the first action on.
    rows: list[Row] = [((0,), F, 1.0), ((0,), B, 1.0), ((0,), F, 1.0), ((0,), B, 1.0)]
    place, end_s, forced = scheduled(actions_of(rows, [(0, 1), (2, 3)]), [0, 0, 1, 1], [0.0, 0.0, 1.0, 1.0])
    assert (place.tolist(), end_s, forced) == ([0, 1, 2, 3], 4.0, 0)


@st.composite
def random_actions(draw: st.DrawFn, most_groups: int) -> tuple[ListedActions, list[int], list[float]]:
    """Groups of forwards and their backwards over chains of lanes, some of them wide."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_lanes, num_groups = int(rng.integers(1, 4)), int(rng.integers(1, most_groups + 1))
    rows: list[Row] = []
    edges: list[tuple[int, int]] = []
    groups: list[int] = []
    sizes: list[int] = []
    for group in range(num_groups):
        chain = []
        for _ in range(int(rng.integers(1, 3))):
            low = int(rng.integers(num_lanes))
            chain.append(range(low, int(rng.integers(low + 1, num_lanes + 1))))
        first, depth = len(rows), len(chain)
        own = rng.integers(0, 4, depth).tolist()
        rows += [([*lanes], F, float(rng.integers(1, 9))) for lanes in chain]
        rows += [([*lanes], B, float(rng.integers(1, 9))) for lanes in reversed(chain)]
        edges += [(first + step, first + step + 1) for step in range(2 * depth - 1)]
        groups += 2 * depth * [group]
        sizes += [*own, *reversed(own)]
    # All lanes are there.
    if max(max(lanes) for lanes, _, _ in rows) + 1 < num_lanes:
        rows.append(([num_lanes - 1], F, 1.0))
        groups.append(0)
        sizes.append(0)
    need = np.zeros((num_groups, num_lanes), np.int64)
    for (lanes, back, _), group, size in zip(rows, groups, sizes, strict=True):
        if not back:
            need[group, [*lanes]] += size
    actions = actions_of(rows, edges, room=int(need.max()) + int(rng.integers(0, 3)), sizes=sizes)
    return actions, groups, rng.random(len(rows)).tolist()


@given(random_actions(most_groups=12))
def test_every_schedule_is_valid_within_memory_and_as_long_as_it_says(
    case: tuple[ListedActions, list[int], list[float]],
) -> None:
    actions, groups, priority = case
    place, end_s, forced = scheduled(actions, groups, priority)
    assert sorted(place) == [*range(len(place))]
    order = np.argsort(place)
    sources = np.repeat(np.arange(len(place)), np.diff(actions.user_offsets))
    assert np.all(place[sources] < place[actions.user_actions])
    assert forced == 0
    assert most_held(actions, order) <= actions.room_bytes.max()
    assert end_s == pytest.approx(timed(actions, order))
    again, _, _ = scheduled(actions, groups, priority)
    assert np.array_equal(place, again)


@settings(max_examples=25)
@given(random_actions(most_groups=2))
def test_no_schedule_beats_brute_force_and_most_are_near(case: tuple[ListedActions, list[int], list[float]]) -> None:
    actions, groups, priority = case
    room = actions.room_bytes.max()
    best = min(timed(actions, order) for order in orders(actions) if most_held(actions, order) <= room)
    ends = [scheduled(actions, groups, sign * np.array(priority))[1] for sign in (1, -1)]
    event("optimal" if min(ends) == pytest.approx(best) else "not optimal")
    assert min(ends) >= best - 1e-9
    # Graham's bound holds for actions of one lane; wide ones cost little more here.
    assert min(ends) <= 2 * best + len(groups)
