"""Whose turn collective passes are: where a replica without units of its own takes part in the passes of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from entrain_bench.arrays import IntArray, rows_of
from entrain_bench.costs.sharding import collective_passes
from entrain_bench.program import Pass, Program
from entrain_bench.train.messages.rank_plan import Step


@dataclass(frozen=True, slots=True)
class EmptyPass:
    """A pass of a sharded module in which a replica has no chunk.

    Attributes:
        module: position among the model's modules.
        kind: forward or backward.
        microbatch, part: of the others' chunks.
    """

    module: int
    kind: Pass
    microbatch: int
    part: int


def empty_passes(program: Program, steps: Sequence[Step]) -> dict[int, list[EmptyPass]]:
    """What a rank runs before some of its steps, by the step's place; nothing if no module is sharded.

    All ranks go through the collective passes in one order, which follows from the program alone.

    Args:
        program: of all ranks.
        steps: this rank's actions in order; the sharded modules are on all ranks.
    """
    if not any(placed.sharded for placed in program.layout.modules):
        return {}
    group = collective_passes(program)
    _, example = np.unique(group, return_index=True)
    own = {int(group[step.action]) for step in steps if group[step.action] >= 0}
    rest = iter(turn for turn in _order_of_groups(program, group))
    found: dict[int, list[EmptyPass]] = {}

    def skipped(until: int | None) -> list[EmptyPass]:
        passes = []
        for turn in rest:
            if turn == until:
                break
            assert turn not in own
            passes.append(_as_empty(program, int(example[np.searchsorted(group[example], turn)])))
        return passes

    for place, step in enumerate(steps):
        if group[step.action] >= 0:
            found[place] = skipped(int(group[step.action]))
        elif step.kind is Pass.GRAD_SYNC:
            found[place] = skipped(None)
    return {place: passes for place, passes in found.items() if passes}


def _as_empty(program: Program, action: int) -> EmptyPass:
    module, chunk = int(program.module[action]), int(program.chunk[action])
    chunks = program.chunks[module]
    return EmptyPass(module, Pass(int(program.kind[action])), int(chunks.microbatch[chunk]), int(chunks.part[chunk]))


def _order_of_groups(program: Program, group: IntArray) -> list[int]:
    """Groups in an order that every lane's and every dependency's agrees with; of several the lowest number first."""
    lane, action = rows_of(program.lane_offsets), program.lane_actions
    member = group[action] >= 0
    lane, turn = lane[member], group[action[member]]
    same = lane[1:] == lane[:-1]
    source, target = group[program.dep_actions], group[rows_of(program.dep_offsets)]
    both = (source >= 0) & (target >= 0)
    before = np.concatenate([turn[:-1][same], source[both]])
    after = np.concatenate([turn[1:][same], target[both]])
    pairs = np.unique(np.stack([before, after]), axis=1)
    count = int(group.max()) + 1
    missing = np.bincount(pairs[1], minlength=count)
    follows: list[list[int]] = [[] for _ in range(count)]
    for one, other in pairs.T.tolist():
        follows[one].append(other)
    ready, order = np.flatnonzero(missing == 0).tolist(), []
    heapify(ready)
    while ready:
        order.append(turn_of := heappop(ready))
        for other in follows[turn_of]:
            missing[other] -= 1
            if not missing[other]:
                heappush(ready, other)
    return order
