"""What must hold of every program, whoever built it."""

from __future__ import annotations

import numpy as np

from entrain_bench.arrays import rows_of
from entrain_bench.errors import UserError
from entrain_bench.program.columns import Program


def check_program(program: Program) -> None:
    """Check that every unit is processed exactly once and every lane runs exactly its own actions.

    Whether the lane orders agree with the dependencies is found out by executing them (``DeadlockError``).

    Raises:
        UserError: naming the sample, microbatch or rank.
    """
    shapes = program.shapes
    for module, chunks in zip(program.model.modules, program.chunks, strict=True):
        units = module.units(shapes)
        seen = np.bincount(chunks.members, minlength=shapes.num_items if module.is_encoder else len(shapes))
        wrong = units[seen[units] != 1]
        if wrong.size:
            sample = shapes.item_sample[wrong[0]] if module.is_encoder else wrong[0]
            what = f"item {wrong[0]} of sample" if module.is_encoder else "sample"
            raise UserError(
                f"program: {what} {shapes.sample_ids[sample]} is processed {seen[wrong[0]]} times by {module.name}"
            )
        if seen.sum() != len(units):
            raise UserError(f"program: {module.name} processes items that are not of its modalities")
        empty = np.flatnonzero(np.diff(chunks.offsets) == 0)
        if empty.size:
            raise UserError(f"program: microbatch {chunks.microbatch[empty[0]]} of {module.name} has an empty chunk")
    _check_lanes(program)


def _check_lanes(program: Program) -> None:
    layout = program.layout
    lane = rows_of(program.lane_offsets)
    listed = np.bincount(program.lane_actions, minlength=program.num_actions)
    wrong = np.flatnonzero(listed != program.num_lanes)
    if wrong.size:
        first = wrong[0]
        raise UserError(
            f"program: {program.view(first)} is listed on {listed[first]} lanes, not {program.num_lanes[first]}"
        )
    action = program.lane_actions
    chunked = program.chunk[action] >= 0
    for index, blocks in enumerate(layout.blocks):
        mine = chunked & (program.module[action] == index)
        block = program.replica[action[mine]] * blocks.num_stages + program.stage[action[mine]]
        held = np.unique(rows_of(blocks.offsets) * layout.num_lanes + blocks.lanes)
        pair = block * layout.num_lanes + lane[mine]
        misplaced = np.flatnonzero(held[np.minimum(np.searchsorted(held, pair), len(held) - 1)] != pair)
        if misplaced.size:
            where = int(layout.lane_first_rank[lane[mine][misplaced[0]]])
            raise UserError(
                f"program: rank {where} runs {program.view(action[mine][misplaced[0]])}, whose layers it does not hold"
            )
