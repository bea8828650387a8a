"""DIP's search: orders of microbatches that a tree search proposes, scored by the interleaver; compiled."""

from __future__ import annotations

from time import perf_counter

import numpy as np
from numba import njit

from entrain_bench.base.arrays import IntArray
from entrain_bench.base.compiled import in_threads

from .interleaver import interleave
from .search import ROOT, exploration, learn, new_tree, propose
from .segments import Segments
from .state import Actions, empty_schedule, room_for


def best_slots(segments: Segments, rounds: int, seconds: float | None = None) -> IntArray:
    """Slot of every action in the best believed order found, set by set ``[actions]``.

    A tree search a set. The first rollout is the order of arrival, so nothing is believed slower than that.

    Args:
        segments: what is ordered.
        rounds: rollouts beyond the first.
        seconds: wall time after which no rollout starts; None sets no limit.
    """
    started = perf_counter()
    num_sets, num_actions = len(segments.num_groups), len(segments.lane)
    members = _members(segments.lane_set, num_sets)
    own = _members(segments.lane_set[segments.lane], num_sets)
    spread = exploration(rounds + 1)
    trees = [new_tree(count * segments.per_group, spread) for count in segments.num_groups.tolist()]
    # The same moves in every iteration: the same batch always gets the same order.
    rngs = [np.random.default_rng(one) for one in range(num_sets)]
    actions = _actions(segments)
    state = room_for(segments.lane, segments.is_backward, segments.room_bytes, int(segments.num_groups.max()))
    labels = segments.group, segments.element, segments.per_group, segments.rank
    schedule, slot = empty_schedule(num_actions), np.zeros(num_actions, np.int64)

    def search(num_rollouts: int) -> None:
        def search_one(one: int) -> None:
            own_search = members[one], own[one], trees[one], rngs[one]
            search_set(num_rollouts, *own_search, *labels, actions, state, schedule, slot)

        in_threads(search_one, num_sets)

    if seconds is None:
        search(rounds + 1)
        return slot
    search(1)
    for _ in range(rounds):
        if perf_counter() - started >= seconds:
            break
        search(1)
    return slot


def _members(label: IntArray, num_labels: int) -> list[IntArray]:
    """What has each label, rising."""
    bounds = np.cumsum(np.bincount(label, minlength=num_labels))[:-1]
    return np.split(np.argsort(label, kind="stable"), bounds)


def _actions(segments: Segments) -> Actions:
    """The segments for the interleaver, with room for groups and priorities, which change with the order."""
    return Actions(
        lane=segments.lane,
        is_backward=segments.is_backward,
        duration_s=segments.duration_s,
        priority=np.zeros(len(segments.lane)),
        group=np.zeros(len(segments.lane), np.int64),
        size_bytes=segments.size_bytes,
        num_waits=segments.num_waits,
        user_offsets=segments.user_offsets,
        user_actions=segments.user_actions,
    )


@njit(cache=True, nogil=True)
def search_set(  # type: ignore[no-untyped-def]
    num_rollouts, members, own, tree, rng, group, element, per_group, rank, actions, state, schedule, slot
):
    """More rollouts of one set, and the slots of its best one.

    The place of its element in the proposed order is a segment's priority, then its rank in the group. Groups come by
    the first of their elements.

    Args:
        num_rollouts: how many, at most: none follow when all orders are scored.
        members: lanes of the set ``[members]``.
        own: its actions ``[own]``.
        tree: of its search.
        rng: random numbers of its search.
        group: see ``Segments``.
        element: likewise.
        per_group: likewise.
        rank: see ``Segments``.
        actions: of all sets; takes groups and priorities of the set's.
        state: see ``interleave``.
        schedule: room for the latest schedule.
        slot: of every action in the best schedule so far; takes those of the set's ``[actions]``.
    """
    place = np.empty(len(tree.order), np.int64)
    group_place = np.empty(len(tree.order) // per_group, np.int64)
    for _ in range(num_rollouts):
        propose(tree, rng)
        num_seen = 0
        group_place[:] = -1
        for index in range(len(place)):
            place[tree.proposed[index]] = index
            its_group = tree.proposed[index] // per_group
            if group_place[its_group] < 0:
                group_place[its_group] = num_seen
                num_seen += 1
        for action in own:
            actions.group[action] = group_place[group[action]]
            # No rank is as high as the number of actions.
            actions.priority[action] = place[element[action]] * float(len(rank)) + rank[action]
        interleave(members, own, actions, state, schedule)
        end_s = 0.0
        for action in own:
            end_s = max(end_s, schedule.end_s[action])
        if learn(tree, end_s):
            for action in own:
                slot[action] = schedule.slot[action]
        if tree.finished[ROOT]:
            break
