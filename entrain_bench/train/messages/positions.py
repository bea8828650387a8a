"""Orders of a program's actions that its dependencies and all its lanes agree with."""

from __future__ import annotations

from graphlib import TopologicalSorter
from heapq import heappop, heappush

import numpy as np

from entrain_bench.balancing.chunk_estimates import packed_durations
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arrays import FloatArray, IntArray, offsets_from_counts, rows_of, take_rows
from entrain_bench.costs.edges import held_s
from entrain_bench.costs.sharding import collective_passes
from entrain_bench.program import Program


def order_of_actions(program: Program, seconds: FloatArray | None = None) -> IntArray:
    """Place of each action in one order of all, the same on every rank ``[actions]``.

    Actions come in the order in which they would end if only they took time (``seconds`` each; None: the same), so most
    messages arrive while other actions run. Collective passes of one turn come before all of the next.
    """
    work = np.ones(program.num_actions) if seconds is None else seconds
    ns = np.maximum(np.rint(work * 1e9), 1).astype(np.int64)
    order = np.empty(program.num_actions, np.int64)
    order[np.argsort(positions_of_actions(program, ns) + ns, kind="stable")] = np.arange(program.num_actions)
    return order


def believed_order(program: Program, profile: Profile) -> IntArray:
    """``order_of_actions`` if passes and the transfers that hold their ranks take as long as the profile estimates."""
    seconds = np.zeros(program.num_actions)
    handed = profile.programs.handovers(program)
    seconds[: program.first_action[-1]] = packed_durations(program, profile)
    return order_of_actions(program, seconds + held_s(program, handed.send_s, handed.receive_s))


def positions_of_actions(program: Program, work: IntArray | None = None) -> IntArray:
    """Work of the longest chain that must end before each action starts ``[actions]``; None: 1 for each action."""
    lane = rows_of(program.lane_offsets)
    action = program.lane_actions
    follows = lane[1:] == lane[:-1]
    ends, begins = _turns(program)
    before = np.concatenate([program.dep_actions, action[:-1][follows], ends])
    after = np.concatenate([rows_of(program.dep_offsets), action[1:][follows], begins])
    num_nodes = max(program.num_actions, int(begins.max(initial=-1)) + 1)
    order = np.argsort(before, kind="stable")
    offsets = offsets_from_counts(np.bincount(before, minlength=num_nodes))
    after = after[order]
    missing = np.bincount(after, minlength=num_nodes)
    work = np.ones(program.num_actions, np.int64) if work is None else work
    work = np.append(work, np.zeros(num_nodes - program.num_actions, np.int64))
    position = np.zeros(num_nodes, np.int64)
    ready = np.flatnonzero(missing == 0)
    while len(ready):
        bounds, edges = take_rows(offsets, ready)
        freed = after[edges]
        np.maximum.at(position, freed, np.repeat(position[ready] + work[ready], np.diff(bounds)))
        np.subtract.at(missing, freed, 1)
        ready = np.unique(freed[missing[freed] == 0])
    assert not missing.any(), "an order that lanes, dependencies and turns agree with"
    return position[: program.num_actions]


def _turns(program: Program) -> tuple[IntArray, IntArray]:
    """Edges over further nodes that put the passes of a collective before those of the next ``[edges]``."""
    nothing = np.zeros(0, np.int64)
    if not any(placed.sharded for placed in program.layout.modules):
        return nothing, nothing
    group = collective_passes(program)
    turn = np.empty(int(group.max()) + 1, np.int64)
    turn[order_of_groups(program, group)] = np.arange(len(turn))
    passes = np.flatnonzero(group >= 0)
    gap = program.num_actions + turn[group[passes]]
    later = gap > program.num_actions
    return np.concatenate([passes, gap[later] - 1]), np.concatenate([gap, passes[later]])


def order_of_groups(program: Program, group: IntArray) -> list[int]:
    """Groups in an order that every lane's and every dependency's agrees with; of several the lowest number first."""
    lane = rows_of(program.lane_offsets)
    action = program.lane_actions
    member = group[action] >= 0
    lane = lane[member]
    turn = group[action[member]]
    same = lane[1:] == lane[:-1]
    source = group[program.dep_actions]
    target = group[rows_of(program.dep_offsets)]
    both = (source >= 0) & (target >= 0)
    before = np.concatenate([turn[:-1][same], source[both]])
    after = np.concatenate([turn[1:][same], target[both]])
    sorter = TopologicalSorter(dict.fromkeys(range(int(group.max()) + 1), ()))
    for one, other in zip(before.tolist(), after.tolist(), strict=True):
        sorter.add(other, one)
    sorter.prepare()
    ready = list[int]()
    order = list[int]()
    while sorter.is_active():
        for freed in sorter.get_ready():
            heappush(ready, freed)
        order.append(heappop(ready))
        sorter.done(order[-1])
    return order
