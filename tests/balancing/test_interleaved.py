"""Interleaved 1F1B against Megatron-core's order, its closed form, and 1F1B where stages are not virtual."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.interleaved import Interleaved, find_turns, interleaved_program, interleaved_slots
from entrain_bench.balancing.schedules import one_f_one_b
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program import Pass, Program
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout, ModuleLayout, check_layout
from entrain_bench.program.validate import check_program
from entrain_bench.simulate import place_actions
from entrain_bench.specs.shapes import SampleShapes
from support.builders import (
    durations,
    makespan,
    no_delay,
    placed,
    profile_of,
    samples,
    tiny_cluster,
    tiny_job,
    tiny_model,
    uniform_batch,
)


def virtual_layout(num_ranks: int, stages_per_rank: int, num_microbatches: int, dp: int = 1) -> Layout:
    """One rank a block; as many LLM blocks as virtual stages, encoder on the first of them."""
    model = tiny_model(encoder=2, llm=num_ranks * stages_per_rank)
    ranks = np.arange(dp * num_ranks).reshape(dp, num_ranks, 1)
    held = ranks[:, np.arange(num_ranks * stages_per_rank) % num_ranks]
    vision, llm = model.modules
    return Layout((placed(vision, ranks[:, :1]), placed(llm, held)), num_microbatches)


def virtual_program(num_ranks: int, stages_per_rank: int, num_microbatches: int, dp: int = 1) -> Program:
    model = tiny_model(encoder=2, llm=num_ranks * stages_per_rank)
    layout = virtual_layout(num_ranks, stages_per_rank, num_microbatches, dp)
    check_layout(layout, model, tiny_cluster(dp, num_ranks))
    shapes, assignment = uniform_batch(model, num_microbatches, dp)
    return interleaved_program(model, shapes, layout, assignment)


def llm_order(program: Program, lane: int) -> list[tuple[str, int, int]]:
    """Pass, microbatch and stage of the LLM's actions on a lane."""
    names = {Pass.FORWARD: "F", Pass.BACKWARD: "B"}
    views = [view for view in program.lane(lane) if view.module == "llm" and view.kind in names]
    return [(names[view.kind], view.microbatch, view.stage) for view in views]


SIZES = [(2, 2, 2), (2, 3, 4), (3, 2, 3), (4, 2, 8), (4, 3, 4), (4, 5, 12), (8, 6, 16)]


@pytest.mark.parametrize(("num_ranks", "stages_per_rank", "num_microbatches"), SIZES)
@pytest.mark.filterwarnings("ignore")
def test_the_order_on_every_rank_is_megatrons(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> None:
    from megatron.core.pipeline_parallel.schedules import (  # type: ignore[import-untyped]
        get_pp_rank_microbatches,
        get_schedule_table,
    )

    program = virtual_program(num_ranks, stages_per_rank, num_microbatches)
    table = get_schedule_table(num_microbatches, stages_per_rank, num_ranks)
    for rank in range(num_ranks):
        group: Any = SimpleNamespace(size=lambda: num_ranks, rank=lambda rank=rank: rank)
        communicator = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=stages_per_rank)
        total, _, warmup, remaining = get_pp_rank_microbatches(
            num_microbatches, stages_per_rank, num_ranks, p2p_communicator=communicator
        )
        forwards = [("F", m, turn * num_ranks + rank) for m, turn in table]
        backwards = [("B", m, (stages_per_rank - 1 - turn) * num_ranks + rank) for m, turn in table]
        expected = forwards[:warmup]
        for ahead, behind in zip(forwards[warmup:], backwards, strict=False):
            expected += [ahead, behind]
        assert llm_order(program, rank) == expected + backwards[remaining:]
        assert len(expected) + warmup == 2 * total


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(2, 5), st.integers(1, 4), st.integers(1, 2), st.integers(1, 4), st.integers(1, 4))
def test_any_size_runs_to_the_end_and_takes_the_closed_form(
    num_ranks: int, stages_per_rank: int, groups: int, dp: int, forward: int, backward: int
) -> None:
    program = virtual_program(num_ranks, stages_per_rank, groups * num_ranks, dp)
    check_program(program)
    times = {("llm", Pass.FORWARD): float(forward), ("llm", Pass.BACKWARD): float(backward)}
    # The encoder takes no time, so that all stages are equal.
    seconds = durations(program, lambda view: times.get((view.module, view.kind), 0.0))
    _, end, _ = place_actions(program, seconds, no_delay(program))
    # The bubble is (ranks - 1) stages of one forward and one backward (arXiv:2104.04473, section 2.2.2).
    busy = stages_per_rank * groups * num_ranks
    assert makespan(program, end) == (busy + num_ranks - 1) * (forward + backward)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.integers(1, 4))
def test_slots_of_one_stage_a_rank_are_1f1bs_but_for_the_warmup(num_ranks: int, groups: int) -> None:
    count = np.full(groups * num_ranks, groups * num_ranks)
    number = np.arange(groups * num_ranks)
    ours = interleaved_slots(number, number, count, num_ranks, 1)
    warmup = 2 * (num_ranks - 1 - np.arange(num_ranks))
    theirs = one_f_one_b(number[:, None], count[:, None], warmup)
    assert all(np.array_equal(own, other) for own, other in zip(ours, theirs, strict=True))


def scheduled(layout: Layout, shapes: SampleShapes, assignment: Assignment, model: Any, scheduler: Any) -> Program:
    program: Program = scheduler.schedule(shapes, layout, assignment, profile_of(tiny_job(model), samples((5, [40]))))
    return program


def test_with_virtual_stages_it_is_interleaved() -> None:
    model = tiny_model(encoder=2, llm=8)
    layout = virtual_layout(4, 2, 8)
    shapes, assignment = uniform_batch(model, 8)
    program = scheduled(layout, shapes, assignment, model, Interleaved())
    assert llm_order(program, 3)[:8] == [("F", m, 3) for m in range(4)] + [
        ("F", 0, 7),
        ("B", 0, 7),
        ("F", 1, 7),
        ("B", 1, 7),
    ]


def test_microbatches_that_do_not_divide_are_refused_as_megatron_does() -> None:
    with pytest.raises(
        IncompatibleError,
        match=r"5 microbatches; .* must be a multiple of 4",
    ):
        virtual_program(4, 2, 5)


def test_a_chain_of_both_modules_goes_round_the_ranks_by_hand() -> None:
    # Two ranks, two chunks each: the encoder's layers are the first chunk and part of the second, where the LLM begins.
    model = tiny_model(encoder=2, llm=4)
    layout = Layout(
        (
            ModuleLayout("vision", 1, 1, (3, 1), np.array([[[0], [1]]])),
            ModuleLayout("llm", 1, 1, (1, 3, 2), np.array([[[1], [0], [1]]])),
        ),
        2,
    )
    check_layout(layout, model, tiny_cluster(1, 2))
    turns = find_turns(model, layout)
    assert turns is not None
    assert (turns.num_ranks, turns.turns, [own.tolist() for own in turns.places]) == (2, 2, [[0, 1], [1, 2, 3]])
    shapes, assignment = uniform_batch(model, 2)
    program = scheduled(layout, shapes, assignment, model, Interleaved())
    check_program(program)
    # Rank 0 warms up with both chunks of both microbatches; rank 1 with two forwards, then runs one and one.
    names = {Pass.FORWARD: "F", Pass.BACKWARD: "B"}
    runs = [
        [
            (view.module, names[view.kind], view.microbatch, view.stage)
            for view in program.lane(lane)
            if view.kind in names
        ]
        for lane in range(2)
    ]
    ahead = [("vision", "F", 0, 0), ("vision", "F", 1, 0), ("llm", "F", 0, 1), ("llm", "F", 1, 1)]
    back = [("llm", "B", 0, 1), ("llm", "B", 1, 1), ("vision", "B", 0, 0), ("vision", "B", 1, 0)]
    assert runs[0] == ahead + back
    second = [("vision", "F", 0, 1), ("llm", "F", 0, 0), ("vision", "F", 1, 1), ("llm", "F", 1, 0)]
    between = [("llm", "F", 0, 2), ("llm", "B", 0, 2), ("llm", "F", 1, 2), ("llm", "B", 1, 2)]
    behind = [("llm", "B", 0, 0), ("vision", "B", 0, 1), ("llm", "B", 1, 0), ("vision", "B", 1, 1)]
    assert runs[1] == second + between + behind
    place_actions(program, np.ones(program.num_actions), no_delay(program))
