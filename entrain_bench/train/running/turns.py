"""Whose turn collective passes are: where a replica without units of its own takes part in the passes of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from entrain_bench.costs.sharding import collective_passes
from entrain_bench.program import Pass, Program
from entrain_bench.train.messages.positions import order_of_groups
from entrain_bench.train.messages.rank_plan import Step


@dataclass(frozen=True, slots=True)
class EmptyPass:
    """A pass of a sharded module in which a replica has no chunk."""

    module: int
    kind: Pass
    microbatch: int
    part: int


def empty_passes(program: Program, steps: Sequence[Step]) -> dict[int, list[EmptyPass]]:
    """What a rank runs before some of its steps, by the step's place, in one order of all collective passes."""
    if not any(placed.sharded for placed in program.layout.modules):
        return {}
    group = collective_passes(program)
    _, example = np.unique(group, return_index=True)
    own = {int(group[step.action]) for step in steps if group[step.action] >= 0}
    rest = iter(turn for turn in order_of_groups(program, group))
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
