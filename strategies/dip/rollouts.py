"""DIP's search: orders of microbatches that a tree search proposes, scored by the interleaver; compiled."""

from __future__ import annotations

from time import perf_counter

import numpy as np
from numba import njit

from entrain_bench.balancing.actions import Actions, Wish, room_for
from entrain_bench.balancing.groups import members_of
from entrain_bench.balancing.listing import list_schedule
from entrain_bench.base.arrays import IntArray
from entrain_bench.base.compiled import in_threads

from .search import ROOT, exploration, learn, new_tree, propose
from .segments import Segments


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
    own = members_of(segments.lane_set[segments.lane], num_sets)
    parts = _actions(segments)
    actions = [parts.of(each, np.flatnonzero(segments.lane_set == one)) for one, each in enumerate(own)]
    states = [room_for(each, count) for each, count in zip(actions, segments.num_groups.tolist(), strict=True)]
    spread = exploration(rounds + 1)
    trees = [new_tree(count * segments.per_group, spread) for count in segments.num_groups.tolist()]
    # The same moves in every iteration: the same batch always gets the same order.
    rngs = [np.random.default_rng(one) for one in range(num_sets)]
    labels = [(segments.group[each], segments.element[each], segments.rank[each]) for each in own]
    places = [np.zeros(len(each), np.int64) for each in own]

    def search(num_rollouts: int) -> None:
        def search_one(one: int) -> None:
            of_set = labels[one], actions[one], states[one], places[one]
            search_set(num_rollouts, trees[one], rngs[one], segments.per_group, float(num_actions), *of_set)

        in_threads(search_one, num_sets)

    if seconds is None:
        search(rounds + 1)
    else:
        search(1)
        for _ in range(rounds):
            if perf_counter() - started >= seconds:
                break
            search(1)
    slot = np.zeros(num_actions, np.int64)
    for each, place in zip(own, places, strict=True):
        slot[each] = place
    return slot


def _actions(segments: Segments) -> Actions:
    """The segments for the list scheduler: one lane each, and what they hand on is there at once."""
    count, num_lanes = len(segments.lane), len(segments.room_bytes)
    none, at_once = np.zeros(count, np.int64), np.zeros(count)
    return Actions(
        lane_offsets=np.arange(count + 1),
        lanes=segments.lane,
        is_backward=segments.is_backward,
        of_llm=none,
        duration_s=segments.duration_s,
        send_s=at_once,
        receive_s=at_once,
        size_bytes=segments.size_bytes,
        num_waits=segments.num_waits,
        user_offsets=segments.user_offsets,
        user_actions=segments.user_actions,
        user_delay_s=np.zeros(len(segments.user_actions)),
        station=np.arange(num_lanes),
        room_bytes=segments.room_bytes,
        tail_s=at_once,
        backward=none,
        kept_bytes=none,
        kept_s=at_once,
    )


@njit(cache=True, nogil=True)
def search_set(  # type: ignore[no-untyped-def]
    num_rollouts, tree, rng, per_group, spread, labels, actions, state, best_place
):
    """More rollouts of one set, none when all orders are scored; ``best_place`` takes its best order ``[actions]``.

    The place of its element in the proposed order is a segment's priority, then its rank in the group, which is below
    ``spread``. Groups come by the first of their elements. ``labels`` are group, element and rank (``Segments``).
    """
    group, element, rank = labels
    place = np.empty(len(tree.order), np.int64)
    group_place = np.empty(len(tree.order) // per_group, np.int64)
    turn, held = np.empty_like(best_place), np.zeros_like(best_place)
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
        wish = Wish(group_place[group], place[element] * spread + rank, held, True, 0.0, False)
        end_s, _ = list_schedule(actions, wish, state, turn)
        if learn(tree, end_s):
            best_place[:] = turn
        if tree.finished[ROOT]:
            break
