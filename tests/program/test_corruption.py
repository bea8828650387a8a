"""Corrupted programs: whatever is lost, doubled or on a foreign rank is found and named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings

from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.base.errors import UserError
from entrain_bench.program import Pass, Program
from entrain_bench.program.assignment import Assignment, Chunks, ModuleAssignment
from entrain_bench.program.layout import Layout
from entrain_bench.program.validate import check_program
from entrain_bench.specs.shapes import shapes_from_lists
from support.builders import (
    AV_MODEL,
    as_ints,
    chain_layout,
    placed,
    random_av_program,
    rngs,
    tiny_model,
    uniform_batch,
)

MODEL = tiny_model(encoder=2, llm=2)


def small_program(dp: int = 2) -> Program:
    layout = chain_layout(MODEL, 1, 1, 3, dp)
    shapes, assignment = uniform_batch(MODEL, 3, dp)
    behind = stages_behind(layout)
    program = chain_program(MODEL, shapes, layout, assignment, behind, weight_delay=[np.zeros_like(n) for n in behind])
    check_program(program)
    return program


def with_chunks(program: Program, module: int, chunks: Chunks) -> Program:
    rows = list(program.chunks)
    rows[module] = chunks
    return replace(program, chunks=tuple(rows))


@pytest.mark.parametrize("module", [0, 1])
def test_a_dropped_member_is_found(module: int) -> None:
    program = small_program()
    chunks = program.chunks[module]
    lost = int(chunks.members[2])
    offsets = chunks.offsets.copy()
    offsets[3:] -= 1
    broken = with_chunks(program, module, replace(chunks, offsets=offsets, members=np.delete(chunks.members, 2)))
    with pytest.raises(UserError, match=rf"sample {lost} is processed 0 times by {MODEL.modules[module].name}"):
        check_program(broken)


def test_a_member_replaced_by_another_is_found() -> None:
    program = small_program()
    members = program.chunks[1].members.copy()
    members[0] = members[1]
    with pytest.raises(UserError, match=r"is processed (0|2) times by llm"):
        check_program(with_chunks(program, 1, replace(program.chunks[1], members=members)))


def test_an_item_of_another_modality_is_found() -> None:
    shapes = shapes_from_lists(["image", "audio"], [(5, [("image", 8, 2), ("audio", 8, 2)])])
    layout = Layout(tuple(placed(module, [[[rank]]]) for rank, module in enumerate(AV_MODEL.modules)), 1)
    zero = np.zeros(1, np.int64)
    assignment = Assignment(tuple(ModuleAssignment(zero.copy(), zero.copy()) for _ in range(3)))
    program = chain_program(AV_MODEL, shapes, layout, assignment, stages_behind(layout))
    check_program(program)
    chunks = replace(program.chunks[0], offsets=as_ints([0, 2]), members=as_ints([0, 1]))
    with pytest.raises(UserError, match="not of its modalities"):
        check_program(with_chunks(program, 0, chunks))


def test_an_empty_chunk_is_found() -> None:
    program = small_program()
    offsets = program.chunks[0].offsets.copy()
    offsets[1] = 0
    with pytest.raises(UserError, match="empty chunk"):
        check_program(with_chunks(program, 0, replace(program.chunks[0], offsets=offsets)))


def test_an_action_on_a_foreign_lane_is_found() -> None:
    program = small_program()
    order = program.lane_actions.copy()
    here, there = program.lane_offsets[0], program.lane_offsets[1]
    order[[here, there]] = order[[there, here]]
    with pytest.raises(UserError, match=r"rank \d+ runs .* whose layers it does not hold"):
        check_program(replace(program, lane_actions=order))


@pytest.mark.parametrize("kind", list(Pass))
def test_a_missing_action_is_found(kind: Pass) -> None:
    program = small_program()
    victim = int(np.flatnonzero(program.kind == kind)[-1])
    entry = int(np.flatnonzero(program.lane_actions == victim)[0])
    lane = int(np.searchsorted(program.lane_offsets, entry, side="right")) - 1
    offsets = program.lane_offsets.copy()
    offsets[lane + 1 :] -= 1
    broken = replace(program, lane_offsets=offsets, lane_actions=np.delete(program.lane_actions, entry))
    with pytest.raises(UserError, match=r"is listed on \d lanes, not \d"):
        check_program(broken)


@pytest.mark.parametrize("kind", [Pass.GRAD_SYNC, Pass.OPTIMIZER])
def test_a_step_on_a_foreign_lane_is_found(kind: Pass) -> None:
    program = small_program(dp=1)
    one, other = (int(np.flatnonzero((program.kind == kind) & (program.module == m))[0]) for m in (0, 1))
    here, there = (int(np.flatnonzero(program.lane_actions == action)[0]) for action in (one, other))
    order = program.lane_actions.copy()
    order[[here, there]] = order[[there, here]]
    with pytest.raises(UserError):
        check_program(replace(program, lane_actions=order))


@pytest.mark.wide
@settings(max_examples=60, deadline=None)
@given(rngs)
def test_lists_that_name_an_action_on_another_lane_are_found(rng: np.random.Generator) -> None:
    program = random_av_program(rng)
    lanes = np.repeat(np.arange(program.layout.num_lanes), np.diff(program.lane_offsets))
    one, other = rng.integers(0, len(lanes), 2)
    swapped = program.lane_actions[[other, one]]
    held = {lane: {view.index for view in program.lane(lane)} for lane in range(program.layout.num_lanes)}
    foreign = swapped[0] not in held[int(lanes[one])] or swapped[1] not in held[int(lanes[other])]
    assume(foreign)
    order = program.lane_actions.copy()
    order[[one, other]] = swapped
    with pytest.raises(UserError):
        check_program(replace(program, lane_actions=order))
