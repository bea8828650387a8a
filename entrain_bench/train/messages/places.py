"""Where a rank stands in a layout: the stages it holds, and the lane it acts with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entrain_bench.program.layout import Layout


@dataclass(frozen=True, slots=True)
class Place:
    """What a rank holds of one module: a stage of a replica, at a place in its block (TP innermost)."""

    module: int
    replica: int
    stage: int
    position: int


def places_of(layout: Layout, rank: int) -> list[Place]:
    """Everything the rank holds, by module and stage."""
    return [
        Place(index, int(replica), int(stage), int(position))
        for index, module in enumerate(layout.modules)
        for replica, stage, position in np.argwhere(module.ranks == rank)
    ]


def block_of(layout: Layout, module: int, replica: int, stage: int) -> list[int]:
    """The ranks of a stage of a replica, TP innermost."""
    ranks: list[int] = layout.modules[module].ranks[replica, stage].tolist()
    return ranks


def lane_of_rank(layout: Layout, rank: int) -> int | None:
    """The lane the rank acts with; None for a rank the layout does not use."""
    held = {
        (place.module, place.replica * layout.modules[place.module].pp + place.stage)
        for place in places_of(layout, rank)
    }
    if not held:
        return None
    inside, outside = list[set[int]](), list[set[int]]()
    for module, blocks in enumerate(layout.blocks):
        for block, lanes in enumerate(np.split(blocks.lanes, blocks.offsets[1:-1])):
            (inside if (module, block) in held else outside).append(set(lanes.tolist()))
    (lane,) = set.intersection(*inside).difference(*outside)
    return lane
