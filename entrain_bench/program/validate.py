"""Validate programs: every sample once per module and pass, no cycle, order feasible on every rank."""

import numpy as np

from entrain_bench.base.arrays import rows_of
from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.program.columns import Program


def check_program(program: Program) -> None:
    """Raise ``UserError`` unless every unit is processed exactly once and every lane runs exactly its own actions."""
    for index, placed in enumerate(program.layout.modules):
        if placed.scatters and program.splits_backward(index):
            shared = "weights" if placed.sharded else "gradients"
            raise IncompatibleError(
                f"strategy.scheduler: cannot split the backward of {placed.module}, because its {shared} are sharded"
            )
    shapes = program.shapes
    for module, chunks in zip(program.model.modules, program.chunks, strict=True):
        units = module.units(shapes)
        seen = np.bincount(chunks.members, minlength=shapes.num_items if module.per_item else len(shapes))
        wrong = units[seen[units] != 1]
        if wrong.size:
            sample = module.owners(shapes, wrong)[0]
            what = f"item {wrong[0]} of sample" if module.per_item else "sample"
            raise UserError(
                f"program: {what} {shapes.name_of(sample)} is processed {seen[wrong[0]]} times by {module.name}"
            )
        if seen.sum() != len(units):
            raise UserError(f"program: {module.name} processes items that are not of its modalities")
        empty = np.flatnonzero(np.diff(chunks.offsets) == 0)
        if empty.size:
            raise UserError(f"program: microbatch {chunks.microbatch[empty[0]]} of {module.name} has an empty chunk")
    _check_lanes(program)


def _check_lanes(program: Program) -> None:
    layout = program.layout
    action = program.lane_actions
    lane = rows_of(program.lane_offsets)
    listed = np.bincount(action, minlength=program.num_actions)
    wrong = np.flatnonzero(listed != program.num_lanes)
    if wrong.size:
        first = wrong[0]
        raise UserError(
            f"program: {program.view(first)} is listed on {listed[first]} lanes, not {program.num_lanes[first]}"
        )
    shared = program.num_lanes[action] > 1
    pair = np.sort(action[shared].astype(np.int64) * layout.num_lanes + lane[shared])
    twice = np.flatnonzero(pair[1:] == pair[:-1])
    if twice.size:
        repeated, where = divmod(int(pair[twice[0]]), layout.num_lanes)
        rank = layout.lane_first_rank[where]
        raise UserError(f"program: {program.view(repeated)} is listed twice on the lane of rank {rank}")
    for index, blocks in enumerate(layout.blocks):
        mine = np.flatnonzero(program.module[action] == index)
        actions = action[mine]
        # A pass belongs to the block of its replica, a step to all that hold its stage: numbered behind the blocks.
        step = program.chunk[actions] < 0
        num_blocks = len(blocks.rank_set)
        block = np.where(step, num_blocks, program.replica[actions] * blocks.num_stages) + program.stage[actions]
        holder = num_blocks + rows_of(blocks.held_offsets) % blocks.num_stages
        holds = np.concatenate([rows_of(blocks.offsets), holder]) * layout.num_lanes
        holds += np.concatenate([blocks.lanes, blocks.held_lanes])
        misplaced = np.flatnonzero(~np.isin(block.astype(np.int64) * layout.num_lanes + lane[mine], holds))
        if misplaced.size:
            entry = mine[misplaced[0]]
            rank = int(layout.lane_first_rank[lane[entry]])
            raise UserError(f"program: rank {rank} runs {program.view(action[entry])}, whose layers it does not hold")
