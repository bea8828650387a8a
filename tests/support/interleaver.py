"""Actions for DIP's interleaver, and the interleaver once more, from the definition and in plain Python."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from entrain_bench.balancing.chunk_groups import split_by_label
from entrain_bench.balancing.listing import BACKWARD, FORWARD, ListedActions, Wish, list_schedule
from entrain_bench.base.arrays import FloatArray, IntArray, offsets_from_counts, rows_of


class Single(NamedTuple):
    """Actions of one lane each, whose results are there at once."""

    lane: IntArray
    is_backward: IntArray
    duration_s: FloatArray
    priority: FloatArray
    group: IntArray
    size_bytes: IntArray
    num_waits: IntArray
    user_offsets: IntArray
    user_actions: IntArray


def in_order(actions: Single, lane_set: IntArray, room_bytes: IntArray) -> tuple[IntArray, FloatArray, int]:
    """Slot and end of every action, and the number of forced forwards, of all sets."""
    count, num_lanes = len(actions.lane), len(room_bytes)
    none, at_once = np.zeros(count, np.int64), np.zeros(count)
    whole = ListedActions(
        lane_offsets=np.arange(count + 1),
        lanes=actions.lane,
        station=np.arange(num_lanes),
        room_bytes=room_bytes,
        user_delay_s=np.zeros(len(actions.user_actions)),
        **{name: getattr(actions, name) for name in ListedActions._fields if hasattr(actions, name)},
        **dict.fromkeys(("of_llm", "backward", "kept_bytes"), none),
        **dict.fromkeys(("send_s", "receive_s", "tail_s", "kept_s"), at_once),
    )
    slot, end_s, forced = np.zeros(count, np.int64), np.zeros(count), 0
    for one, own in enumerate(split_by_label(lane_set[actions.lane], 1 + int(lane_set.max()))):
        if not len(own):
            continue
        part, turn = whole.of(own, np.flatnonzero(lane_set == one)), np.zeros(len(own), np.int64)
        wish = Wish(actions.group[own], actions.priority[own], np.zeros_like(own), True)
        forced += list_schedule(part, wish, turn)[1]
        free_s, ready_s, num_run = np.zeros(num_lanes), np.zeros(count), np.zeros(num_lanes, np.int64)
        for action in own[np.argsort(turn)]:
            lane = actions.lane[action]
            slot[action], num_run[lane] = num_run[lane], num_run[lane] + 1
            free_s[lane] = end_s[action] = max(free_s[lane], ready_s[action]) + actions.duration_s[action]
            users = actions.user_actions[actions.user_offsets[action] : actions.user_offsets[action + 1]]
            ready_s[users] = np.maximum(ready_s[users], end_s[action])
    return slot, end_s, forced


def linked(edges: Iterable[tuple[int, int]], **columns: IntArray | FloatArray) -> Single:
    count = len(columns["lane"])
    source, user = np.array(sorted(edges), np.int64).reshape(-1, 2).T
    return Single(
        **columns,
        num_waits=np.bincount(user, minlength=count),
        user_offsets=offsets_from_counts(np.bincount(source, minlength=count)),
        user_actions=np.ascontiguousarray(user),
    )


def random_actions(rng: np.random.Generator) -> tuple[Single, IntArray, IntArray]:
    """Groups of chunks on lanes of their set, with the set of each lane and often too little room.

    Every chunk's backward waits for its forward; chunks of a group wait for each other, backwards the other way round.
    """
    lane_set = rng.permutation(np.repeat(np.arange(3), rng.integers(1, 4, 3)))
    rows, edges = [], []
    for one in range(3):
        lanes = np.flatnonzero(lane_set == one)
        for group in range(int(rng.integers(1, 5))):
            first = len(rows)
            places = rng.choice(lanes, int(rng.integers(1, len(lanes) + 4)))
            chunks, sizes = len(places), rng.integers(0, 4, len(places))
            for kind in (FORWARD, BACKWARD):
                rows += [(lane, kind, group, size) for lane, size in zip(places, sizes, strict=True)]
            for chunk in range(chunks):
                edges.append((first + chunk, first + chunks + chunk))
                for before in np.flatnonzero(rng.random(chunk) < 0.5).tolist():
                    edges.append((first + before, first + chunk))
                    edges.append((first + chunks + chunk, first + chunks + before))
    lane, is_backward, group, size = np.array(rows, np.int64).T.copy()
    actions = linked(
        edges,
        lane=lane,
        is_backward=is_backward,
        duration_s=rng.integers(1, 6, len(rows)).astype(np.float64),
        priority=rng.permutation(len(rows)).astype(np.float64),
        group=group,
        size_bytes=size,
    )
    return actions, lane_set, rng.integers(0, 16, len(lane_set))


class Reference:
    """The interleaver as its docstrings state it, without queues, caches or compilation."""

    def __init__(self, actions: Single, lane_set: IntArray, room_bytes: IntArray) -> None:
        self.actions, self.room = actions, room_bytes
        count, num_lanes = len(actions.lane), len(lane_set)
        self.inputs: list[list[int]] = [[] for _ in range(count)]
        for source, user in zip(rows_of(actions.user_offsets), actions.user_actions, strict=True):
            self.inputs[user].append(int(source))
        self.slot, self.end = np.full(count, -1), np.zeros(count)
        self.free, self.last_pass, self.num_run = np.zeros(num_lanes), [BACKWARD] * num_lanes, [0] * num_lanes
        self.forced = 0
        for one in np.unique(lane_set):
            while self.step(np.flatnonzero(lane_set == one).tolist()):
                pass

    def step(self, lanes: list[int]) -> bool:
        actions, best = self.actions, [self.choice(lane) for lane in lanes]
        best = [action for action in best if action is not None]
        if best:
            action = min(best, key=self.begin)
        else:
            stuck = [action for lane in lanes for action in self.ready(lane)]
            if not stuck:
                return False
            action = min(stuck, key=lambda a: (actions.group[a], actions.priority[a]))
            self.forced += 1
        lane = actions.lane[action]
        self.end[action] = self.free[lane] = self.begin(action) + actions.duration_s[action]
        self.slot[action], self.last_pass[lane] = self.num_run[lane], actions.is_backward[action]
        self.num_run[lane] += 1
        return True

    def ready(self, lane: int) -> list[int]:
        mine = np.flatnonzero((self.actions.lane == lane) & (self.slot < 0)).tolist()
        return [action for action in mine if all(self.slot[source] >= 0 for source in self.inputs[action])]

    def begin(self, action: int) -> float:
        return max([float(self.free[self.actions.lane[action]]), *(float(self.end[i]) for i in self.inputs[action])])

    def choice(self, lane: int) -> int | None:
        """The backward or the forward that begins first; in turn if both could have begun when the lane was free."""
        queues: list[list[int]] = [[], []]
        for action in self.ready(lane):
            if self.actions.is_backward[action] or self.admitted(action):
                queues[self.actions.is_backward[action]].append(action)
        fronts = [min(q, key=lambda a: (self.begin(a), self.actions.priority[a])) for q in queues if q]
        if len(fronts) < 2:
            return fronts[0] if fronts else None
        forward, backward = fronts
        if self.begin(forward) == self.begin(backward) == self.free[lane]:
            return forward if self.last_pass[lane] == BACKWARD else backward
        return backward if self.begin(backward) <= self.begin(forward) else forward

    def admitted(self, forward: int) -> bool:
        """Whether the forward fits, and with it all that the open groups up to its own hold and will hold."""
        actions, lane = self.actions, self.actions.lane[forward]
        mine, done = actions.lane == lane, self.slot >= 0
        sizes = actions.size_bytes
        held = (
            sizes[mine & done & (actions.is_backward == 0)].sum()
            - sizes[mine & done & (actions.is_backward == 1)].sum()
        )
        first_open, own = actions.group[mine & ~done].min(), actions.group[forward]
        # A group will hold what its forwards add, less what its backwards have freed.
        due = sizes[mine & ~done & (actions.is_backward == 1) & (actions.group <= own)].sum()
        return bool(held + sizes[forward] <= self.room[lane] and (own == first_open or due <= self.room[lane]))
