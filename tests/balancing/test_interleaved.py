"""Interleaved and zero-bubble schedules: the orders of Megatron-LM and torch, and closed forms."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.interleaved import (
    Interleaved,
    ZeroBubbleH1,
    ZeroBubbleV,
    find_turns,
    interleaved_program,
)
from entrain_bench.balancing.planning import place_ranks
from entrain_bench.balancing.schedules import OneForwardOneBackward, chain_program, stages_behind
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.costs.memory import Memory
from entrain_bench.program import Pass, Program
from entrain_bench.program.assignment import same_microbatches
from entrain_bench.program.layout import Layout, ModuleLayout, check_layout
from entrain_bench.program.validate import check_program
from entrain_bench.simulate import place_actions
from entrain_bench.specs.model import ModelSpec
from support.builders import (
    chain_layout,
    durations,
    makespan,
    no_delay,
    passes,
    placed,
    profile_of,
    random_samples,
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
# One stage a rank.
PLAIN = [(size, 1, count) for size, count in ((2, 1), (2, 2), (2, 5), (3, 3), (4, 3), (4, 8), (4, 13), (5, 2), (6, 6))]


@pytest.mark.parametrize(("num_ranks", "stages_per_rank", "num_microbatches"), [*SIZES, *PLAIN])
@pytest.mark.filterwarnings("ignore")
def test_the_order_on_every_rank_is_megatrons(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> None:
    from megatron.core.pipeline_parallel.schedules import (  # type: ignore[import-untyped]
        get_pp_rank_microbatches,
        get_schedule_table,
    )

    if stages_per_rank > 1:
        program = virtual_program(num_ranks, stages_per_rank, num_microbatches)
    else:
        model = tiny_model(encoder=0, llm=num_ranks)
        layout = chain_layout(model, 0, num_ranks, num_microbatches)
        shapes, assignment = uniform_batch(model, num_microbatches)
        program = chain_program(model, shapes, layout, assignment, stages_behind(layout))
    table = get_schedule_table(num_microbatches, stages_per_rank, num_ranks)
    virtual = stages_per_rank if stages_per_rank > 1 else None
    for rank in range(num_ranks):
        group: Any = SimpleNamespace(size=lambda: num_ranks, rank=lambda rank=rank: rank)
        communicator = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=virtual)
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


def test_microbatches_that_do_not_divide_are_refused_as_megatron_does() -> None:
    with pytest.raises(IncompatibleError, match=r"5 microbatches; .* must be a multiple of 4"):
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
    program = Interleaved().schedule(shapes, layout, assignment, profile_of(tiny_job(model), shapes))
    check_program(program)
    # Rank 0 warms up with both chunks of both microbatches; rank 1 with two forwards, then runs one and one.
    ahead = ["vision F0", "vision F1", "llm F0", "llm F1"]
    assert passes(program, 0) == [*ahead, "llm B0", "llm B1", "vision B0", "vision B1"]
    second = ["vision F0", "llm F0", "vision F1", "llm F1", "llm F0", "llm B0", "llm F1", "llm B1"]
    assert passes(program, 1) == [*second, "llm B0", "vision B0", "llm B1", "vision B1"]


TORCH_NAMES = {Pass.FORWARD: "F", Pass.BACKWARD: "I", Pass.WEIGHT: "W"}


def h1_program(num_stages: int, num_microbatches: int, encoder_stages: int = 0, dp: int = 1) -> Program:
    """One rank a stage, as many layers on each."""
    llm_stages = num_stages - encoder_stages
    model = tiny_model(encoder=encoder_stages and 2 * encoder_stages - 1, llm=2 * llm_stages)
    layout = chain_layout(model, encoder_stages, llm_stages, num_microbatches, dp)
    shapes, assignment = uniform_batch(model, num_microbatches, dp)
    return ZeroBubbleH1().schedule(shapes, layout, assignment, profile_of(tiny_job(model), shapes))


def v_layout(model: ModelSpec, num_ranks: int, num_microbatches: int, dp: int = 1, encoder_stages: int = 0) -> Layout:
    """One rank a block and a block or more a place; encoders on the first places, or on the first of the LLM's."""
    ranks = np.arange(dp * num_ranks).reshape(dp, num_ranks, 1)[:, place_ranks(num_ranks, 2, "v")]
    modules = [
        placed(module, ranks[:, : max(1, encoder_stages)] if module.is_encoder else ranks[:, encoder_stages:])
        for module in model.modules
    ]
    return Layout(tuple(modules), num_microbatches)


def v_program(num_ranks: int, num_microbatches: int, dp: int = 1) -> Program:
    model = tiny_model(encoder=0, llm=2 * num_ranks)
    shapes, assignment = uniform_batch(model, num_microbatches, dp)
    layout = v_layout(model, num_ranks, num_microbatches, dp)
    return ZeroBubbleV().schedule(shapes, layout, assignment, profile_of(tiny_job(model), shapes))


def torch_order(program: Program, lane: int) -> list[str]:
    """The passes of a lane as torch writes its own."""
    views = (view for view in program.lane(lane) if view.kind in TORCH_NAMES)
    return [f"{view.stage}{TORCH_NAMES[view.kind]}{view.microbatch}" for view in views]


def uniform_makespan(program: Program, forward: float, backward: float, weight: float) -> float:
    times = {Pass.FORWARD: forward, Pass.BACKWARD: backward, Pass.WEIGHT: weight}
    _, end, _ = place_actions(program, durations(program, lambda view: times[view.kind]), no_delay(program))
    return makespan(program, end)


def ranks_of(schedule: Any, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Any:
    """A schedule of torch that has no stages, only their numbers."""
    found = object.__new__(schedule)
    found.pp_group_size, found._n_microbatches = num_ranks, num_microbatches
    found.n_local_stages, found.num_stages = stages_per_rank, stages_per_rank * num_ranks
    # As its constructor has them.
    found.number_of_rounds = max(1, num_microbatches // num_ranks)
    found.microbatches_per_round = num_microbatches // found.number_of_rounds
    return found


ZERO_BUBBLE_SIZES = [(2, 2), (2, 4), (3, 6), (4, 4), (4, 8), (4, 12), (8, 16)]


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), ZERO_BUBBLE_SIZES)
def test_the_order_of_zb_h1_is_torchs_with_one_stage_a_rank(num_ranks: int, num_microbatches: int) -> None:
    from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

    theirs = ranks_of(ScheduleInterleavedZeroBubble, num_ranks, num_microbatches, 1)
    program = h1_program(num_ranks, num_microbatches)
    for rank in range(num_ranks):
        expected = [str(action) for action in theirs._calculate_single_rank_operations(rank) if action is not None]
        assert torch_order(program, rank) == expected


# Torch drops what a batch of fewer than 2p - 1 microbatches lacks, and so do we.
@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches"), [*ZERO_BUBBLE_SIZES, (2, 5), (3, 7), (4, 1), (4, 3), (5, 9)]
)
def test_the_order_of_zb_v_is_torchs(num_ranks: int, num_microbatches: int) -> None:
    from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

    theirs = ranks_of(ScheduleZBVZeroBubble, num_ranks, num_microbatches, 2)
    program = v_program(num_ranks, num_microbatches)
    for rank in range(num_ranks):
        expected = [str(action) for action in theirs._calculate_single_rank_operations(rank) if action is not None]
        assert torch_order(program, rank) == expected


times = st.integers(1, 5)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(0, 8), st.integers(1, 2), times, times, times)
def test_zb_h1_takes_the_closed_form(stages: int, more: int, dp: int, forward: int, backward: int, weight: int) -> None:
    program = h1_program(stages, stages + more, 0, dp)
    check_program(program)
    # arXiv:2401.10241, table 1; a W that is longer than F or B does not fit where it fills the bubble.
    weight = min(forward, backward, weight)
    busy, bubble = (stages + more) * (forward + backward + weight), (stages - 1) * (forward + backward - weight)
    assert uniform_makespan(program, forward, backward, weight) == busy + bubble


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(0, 8), st.integers(1, 2), times, times)
def test_zb_v_has_no_bubble_but_where_ranks_start(ranks: int, more: int, dp: int, unit: int, longer: int) -> None:
    microbatches = 2 * ranks - 1 + more
    program = v_program(ranks, microbatches, dp)
    check_program(program)
    # With F = B = W every rank is busy from its first pass on, and rank i starts at i F.
    assert uniform_makespan(program, unit, unit, unit) == 6 * unit * microbatches + (ranks - 1) * unit
    # A longer B, up to twice as long, delays every rank behind by as much again.
    longer = min(longer, unit)
    uneven = uniform_makespan(program, unit, unit + longer, unit)
    assert uneven == 2 * (3 * unit + longer) * microbatches + (ranks - 1) * (unit + longer)


def test_weight_passes_wait_for_as_many_backwards_as_stages_are_before() -> None:
    program = h1_program(3, 4, encoder_stages=1)
    assert passes(program, 0) == [
        *("vision F0", "vision F1", "vision F2", "vision B0", "vision W0", "vision F3", "vision B1", "vision W1"),
        *("vision B2", "vision W2", "vision B3", "vision W3"),
    ]
    last = [text.removeprefix("llm ") for text in passes(program, 2)]
    assert last == ["F0", "B0", "F1", "B1", "F2", "B2", "W0", "F3", "B3", "W1", "W2", "W3"]


def test_weight_passes_wait_as_long_as_memory_allows() -> None:
    scheduler = ZeroBubbleH1()
    model = tiny_model(encoder=0, llm=8)
    shapes = samples(*[(3000, [])] * 9)
    assignment = same_microbatches(model, shapes, np.zeros(9, np.int64), np.arange(9), np.arange(9))
    layout = chain_layout(model, 0, 4, 9)
    memory = Memory(model)
    behind = stages_behind(layout, 0)
    programs = [
        chain_program(model, shapes, layout, assignment, behind, weight_delay=[np.minimum(3 - behind[0], most)])
        for most in range(4)
    ]
    need = [float(memory.peak_bytes(program).max()) for program in programs]
    assert need == sorted(need)
    assert need[0] < need[-1]
    for budget in (need[0] / 2, *need, 2 * need[-1]):
        tight = profile_of(tiny_job(model, budget_bytes=budget), shapes)
        fitting = [most for most in range(4) if need[most] <= tight.job.planning_budget_bytes]
        found = scheduler.schedule(shapes, layout, assignment, tight)
        assert np.array_equal(found.lane_actions, programs[max(fitting, default=0)].lane_actions)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 4), st.integers(1, 12), st.integers(1, 2), st.sampled_from([0, 1, 2]))
def test_any_batch_runs_to_the_end(seed: int, ranks: int, microbatches: int, dp: int, encoder_stages: int) -> None:
    rng = np.random.default_rng(seed)
    model = tiny_model(encoder=2, llm=2 * ranks)
    shapes = random_samples(rng, int(rng.integers(1, 16)))
    replica, early = rng.integers(0, dp, len(shapes)), rng.integers(0, microbatches, len(shapes))
    late = early + rng.integers(0, 3, len(shapes))
    assignment = same_microbatches(model, shapes, replica, early, late)
    profile = profile_of(tiny_job(model), shapes)
    layouts = [v_layout(model, ranks, microbatches, dp, encoder_stages)]
    layouts += [chain_layout(model, encoder_stages, ranks, microbatches, dp)] if encoder_stages else []
    for layout in layouts:
        assert (find_turns(model, layout, valley=True) is not None) == (layout is layouts[0])
        scheduler = ZeroBubbleV() if layout is layouts[0] else ZeroBubbleH1()
        program = scheduler.schedule(shapes, layout, assignment, profile)
        check_program(program)
        _, end, _ = place_actions(program, rng.random(program.num_actions), no_delay(program))
        assert not np.isnan(end).any()


def test_the_schedule_is_the_one_that_the_layout_asks_for() -> None:
    model = tiny_model(encoder=2, llm=8)
    shapes, assignment = uniform_batch(model, 4)
    profile = profile_of(tiny_job(model), shapes)
    chain, valley = chain_layout(model, 1, 3, 4), v_layout(model, 2, 4)
    split = Layout(chain.modules, 4, split_backward=True)
    expected = [
        (chain, OneForwardOneBackward()),
        (split, ZeroBubbleH1()),
        (valley, ZeroBubbleV()),
    ]
    for layout, scheduler in expected:
        ours, theirs = (each.schedule(shapes, layout, assignment, profile) for each in (Interleaved(), scheduler))
        assert np.array_equal(ours.lane_actions, theirs.lane_actions)
        assert ours.num_actions == theirs.num_actions
