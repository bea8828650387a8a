"""The list scheduler once more, from the definition and in plain Python, and random actions of one lane each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from entrain_bench.balancing.listing import BACKWARD, ListedActions
from entrain_bench.base.arrays import FloatArray, IntArray, rows_of
from support.braid import Row, actions_of


class Case(NamedTuple):
    """What the list scheduler knows of actions."""

    actions: ListedActions
    group: IntArray
    priority: FloatArray


def random_actions(rng: np.random.Generator) -> Case:
    """Groups of chunks on some lanes, often with too little room.

    Every chunk's backward waits for its forward; chunks of a group wait for each other, backwards the other way round.
    """
    num_lanes = int(rng.integers(1, 4))
    # All lanes are there.
    rows: list[Row] = [((num_lanes - 1,), False, 1.0)]
    groups, sizes, edges = [0], [0], list[tuple[int, int]]()
    for group in range(int(rng.integers(1, 5))):
        first = len(rows)
        places = rng.integers(num_lanes, size=int(rng.integers(1, num_lanes + 4)))
        chunks = len(places)
        for backward in (False, True):
            rows += [((int(lane),), backward, float(rng.integers(1, 6))) for lane in places]
        groups += 2 * chunks * [group]
        sizes += 2 * rng.integers(0, 4, chunks).tolist()
        for chunk in range(chunks):
            edges.append((first + chunk, first + chunks + chunk))
            for before in np.flatnonzero(rng.random(chunk) < 0.5).tolist():
                edges.append((first + before, first + chunk))
                edges.append((first + chunks + chunk, first + chunks + before))
    actions = actions_of(rows, edges, sizes=sizes)._replace(room_bytes=rng.integers(0, 16, num_lanes))
    return Case(actions, np.array(groups), rng.permutation(len(rows)).astype(np.float64))


class Reference:
    """The list scheduler as its docstrings state it, without queues, caches or compilation."""

    def __init__(self, case: Case) -> None:
        self.actions, self.group, self.priority = case
        actions = self.actions
        self.room, self.lane = actions.room_bytes, actions.lanes
        count, num_lanes = len(self.lane), len(self.room)
        self.inputs: list[list[int]] = [[] for _ in range(count)]
        for source, user in zip(rows_of(actions.user_offsets), actions.user_actions, strict=True):
            self.inputs[user].append(int(source))
        self.slot, self.end = np.full(count, -1), np.zeros(count)
        self.free, self.last_pass, self.num_run = np.zeros(num_lanes), [BACKWARD] * num_lanes, [0] * num_lanes
        self.forced = 0
        while self.step(range(num_lanes)):
            pass

    def step(self, lanes: range) -> bool:
        actions, best = self.actions, [self.choice(lane) for lane in lanes]
        best = [action for action in best if action is not None]
        if best:
            action = min(best, key=self.begin)
        else:
            stuck = [action for lane in lanes for action in self.ready(lane)]
            if not stuck:
                return False
            action = min(stuck, key=lambda a: (self.group[a], self.priority[a]))
            self.forced += 1
        lane = self.lane[action]
        self.end[action] = self.free[lane] = self.begin(action) + actions.duration_s[action]
        self.slot[action], self.last_pass[lane] = self.num_run[lane], actions.is_backward[action]
        self.num_run[lane] += 1
        return True

    def ready(self, lane: int) -> list[int]:
        mine = np.flatnonzero((self.lane == lane) & (self.slot < 0)).tolist()
        return [action for action in mine if all(self.slot[source] >= 0 for source in self.inputs[action])]

    def begin(self, action: int) -> float:
        return max([float(self.free[self.lane[action]]), *(float(self.end[i]) for i in self.inputs[action])])

    def choice(self, lane: int) -> int | None:
        """The backward or the forward that begins first; in turn if both could have begun when the lane was free."""
        queues: list[list[int]] = [[], []]
        for action in self.ready(lane):
            if self.actions.is_backward[action] or self.admitted(action):
                queues[self.actions.is_backward[action]].append(action)
        fronts = [min(q, key=lambda a: (self.begin(a), self.priority[a])) for q in queues if q]
        if len(fronts) < 2:
            return fronts[0] if fronts else None
        forward, backward = fronts
        if self.begin(forward) == self.begin(backward) == self.free[lane]:
            return forward if self.last_pass[lane] == BACKWARD else backward
        return backward if self.begin(backward) <= self.begin(forward) else forward

    def admitted(self, forward: int) -> bool:
        """Whether the forward fits, and with it all that the open groups up to its own hold and will hold."""
        actions, lane = self.actions, self.lane[forward]
        mine, done = self.lane == lane, self.slot >= 0
        sizes = actions.size_bytes
        held = (
            sizes[mine & done & (actions.is_backward == 0)].sum()
            - sizes[mine & done & (actions.is_backward == 1)].sum()
        )
        first_open, own = self.group[mine & ~done].min(), self.group[forward]
        # A group will hold what its forwards add, less what its backwards have freed.
        due = sizes[mine & ~done & (actions.is_backward == 1) & (self.group <= own)].sum()
        return bool(held + sizes[forward] <= self.room[lane] and (own == first_open or due <= self.room[lane]))
