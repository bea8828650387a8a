"""Steps worked by hand, and measured durations on the simulated clock."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import UserError
from entrain_bench.costs.steps import Steps, last_of_stages
from entrain_bench.program import Pass, Program
from entrain_bench.program.assignment import same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.program.table import timeline_frame
from entrain_bench.program.timeline import Timeline
from entrain_bench.simulate import place_actions
from entrain_bench.simulate.executor import place_steps
from entrain_bench.simulate.replay import replay
from support.builders import as_ints, chain_layout, durations, no_delay, placed, samples, tiny_model, uniform_batch

MODEL = tiny_model(encoder=2, llm=2)
VISION, LLM = MODEL.modules


def steps_of(program: Program, sync_s: list[float], lag_s: list[float]) -> Steps:
    """Overlapped steps of the given times; every replica of a stage lags as much; optimizers take 10 s, 20 s, ..."""
    last = [stage for index in range(len(program.chunks)) for stage in last_of_stages(program, index)]
    return Steps(
        overlapped=True,
        sync_s=np.array(sync_s),
        optimizer_s=10.0 * np.arange(1, len(sync_s) + 1),
        gather_s=np.zeros(len(sync_s)),
        last_backwards=tuple(last),
        lag_s=tuple(np.full(len(rows), lag) for rows, lag in zip(last, lag_s, strict=True)),
        tied=(),
    )


def executed(
    program: Program, steps: Steps, hold_s: FloatArray | None = None
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Passes of 1 s: end of each synchronisation, start, end and transfer wait of each optimizer step."""
    took = durations(program, lambda _: 1.0)
    start, end, wait = place_actions(program, took, no_delay(program), hold_s=hold_s)
    place_steps(program, steps, np.zeros(program.num_actions) if hold_s is None else hold_s, start, end, wait)
    sync, step = program.kind == Pass.GRAD_SYNC, program.kind == Pass.OPTIMIZER
    if steps.overlapped:
        assert start[sync].tolist() == end[sync].tolist()
    assert not wait[sync].any()
    return end[sync].tolist(), start[step].tolist(), end[step].tolist(), wait[step].tolist()


def chain(dp: int = 1, llm_stages: int = 1) -> Program:
    layout = chain_layout(MODEL, 1, llm_stages, 1, dp=dp)
    shapes, assignment = uniform_batch(MODEL, 1, dp=dp)
    return chain_program(MODEL, shapes, layout, assignment, stages_behind(layout))


def colocated() -> Program:
    # Encoder and LLM on one rank: vision F 0-1, llm F 1-2, llm B 2-3, vision B 3-4.
    layout = Layout((placed(VISION, [[[0]]]), placed(LLM, [[[0]]])), 1)
    shapes, zero = samples((10, [40])), np.zeros(1, np.int64)
    assignment = same_microbatches(MODEL, shapes, zero, zero, zero)
    return chain_program(MODEL, shapes, layout, assignment, [as_ints([0]), as_ints([0])])


def test_a_module_is_synchronised_beside_the_backward_of_another_on_its_ranks() -> None:
    program = colocated()
    # The LLM's buckets are through at 3 + 0.75, before the encoder's backward ends; the encoder's follow it.
    sync, start, end, wait = executed(program, steps_of(program, [0.5, 1.5], [0.25, 0.75]))
    assert sync == [4.25, 3.75]
    assert (start, end, wait) == ([4.25, 14.25], [14.25, 34.25], [0.25, 0.0])


def test_links_that_are_still_busy_keep_the_next_module_waiting() -> None:
    program = colocated()
    # The LLM's are through at 3 + 6; then the encoder's take their 2 s, though the last of them was ready at 4.
    sync, start, _, wait = executed(program, steps_of(program, [2.0, 7.0], [1.0, 6.0]))
    assert sync == [11.0, 9.0]
    assert start == [11.0, 21.0]
    assert wait == [7.0, 0.0]


def test_the_slowest_replica_decides() -> None:
    program = chain(dp=2)
    steps = steps_of(program, [2.0, 2.0], [1.0, 1.0])
    uneven = (np.array([1.0, 3.0]), np.array([1.5, 0.5]))
    assert executed(program, replace(steps, lag_s=uneven))[0] == [7.0, 4.5]


def test_a_tied_embedding_is_reduced_when_both_its_stages_are_synchronised() -> None:
    # vision F 0-1, llm F 1-2 and 2-3, B 3-4 (stage 1) and 4-5 (stage 0), vision B 5-6.
    program = chain(llm_stages=2)
    steps = steps_of(program, [0.5, 0.5, 0.5], [0.5, 0.5, 0.5])
    sync, start, _, wait = executed(program, replace(steps, tied=((1, 2, 0.25),)))
    assert sync == [6.5, 5.5, 4.5]
    # 5.5 + 0.25 is no later than the encoder's synchronisation; 5.5 + 4 is.
    assert start == [6.5, 6.5, 6.5]
    sync, start, _, wait = executed(program, replace(steps, tied=((1, 2, 4.0),)))
    assert sync == [6.5, 5.5, 4.5]
    assert start == [9.5, 9.5, 9.5]
    assert wait == [3.5, 3.5, 3.5]


def test_a_stage_without_a_backward_is_synchronised_in_its_turn() -> None:
    # A batch of text: the encoder has no pass. Beside the LLM its turn comes after it, and on its own ranks at once.
    text, zero = samples((10, [])), np.zeros(1, np.int64)
    assignment = same_microbatches(MODEL, text, zero, zero, zero)
    for rank, expected in ((0, 5.0), (1, 2.0)):
        layout = Layout((placed(VISION, [[[rank]]]), placed(LLM, [[[0]]])), 1)
        program = chain_program(MODEL, text, layout, assignment, [as_ints([0]), as_ints([0])])
        steps = steps_of(program, [2.0, 3.0], [1.0, 1.0])
        assert [len(rows) for rows in steps.last_backwards] == [0, 1]
        sync, start, _, _ = executed(program, steps)
        # llm F 0-1, B 1-2.
        assert sync == [expected, 3.0]
        assert min(start) == max(sync)
    # Without anything to reduce it is through before anything happens.
    assert executed(program, replace(steps, sync_s=np.array([0.0, 3.0])))[0] == [0.0, 3.0]


def test_without_overlap_lanes_synchronise_after_all_they_do() -> None:
    program = colocated()
    steps = replace(steps_of(program, [2.0, 3.0], [0.0, 0.0]), overlapped=False, gather_s=np.array([0.5, 0.25]))
    sync, start, end, wait = executed(program, steps)
    assert sync == [6.0, 9.0]
    assert (start, end) == ([9.0, 19.5], [19.5, 39.75])
    assert wait == [0.0, 0.0]
    sync, start, _, wait = executed(chain(), replace(steps, last_backwards=(), lag_s=(), tied=((0, 1, 0.5),)))
    # Encoder 4-6, LLM 3-6; the tied embedding after both.
    assert sync == [6.0, 6.0]
    assert start == [6.5, 6.5]
    assert wait == [0.5, 0.5]


@pytest.mark.parametrize("overlapped", [False, True])
def test_what_holds_a_lane_holds_its_steps(overlapped: bool) -> None:
    program = chain()
    steps = replace(steps_of(program, [0.0, 0.0], [0.0, 0.0]), overlapped=overlapped)
    hold = np.where(program.kind == Pass.BACKWARD, 30.0, 0.0)
    # The LLM's backward ends at 3 and holds its lane until 33, the encoder's ends at 4 and holds until 34.
    _, start, _, _ = executed(program, steps, hold)
    assert start == ([34.0, 33.0] if overlapped else [34.0, 34.0])


def measured(num_microbatches: int, **seconds: list[float]) -> Timeline:
    """A program of one encoder stage and one LLM stage, and when its actions started and ended."""
    layout = chain_layout(MODEL, 1, 1, num_microbatches)
    shapes, assignment = uniform_batch(MODEL, num_microbatches)
    program = chain_program(MODEL, shapes, layout, assignment, stages_behind(layout))
    start, end = (np.array(seconds.get(name, [0.0] * program.num_actions)) for name in ("start", "end"))
    return Timeline(program, start, end, np.zeros_like(start), np.zeros_like(start), np.zeros(2))


def test_actions_keep_their_durations_and_wait_for_nothing_but_order() -> None:
    # Forward and backward of the encoder, of the LLM; gradients and optimizer of each.
    took = measured(
        1,
        start=[10.0, 50.0, 20.0, 30.0, 70.0, 40.0, 80.0, 45.0],
        end=[13.0, 61.0, 25.0, 37.0, 72.0, 41.0, 81.0, 45.5],
    )
    again = replay(took.program, timeline_frame(took)).set_index(["module", "pass"])
    expected = {
        ("vision", "forward"): (0.0, 3.0),
        ("llm", "forward"): (3.0, 8.0),
        ("llm", "backward"): (8.0, 15.0),
        ("vision", "backward"): (15.0, 26.0),
        ("vision", "grad_sync"): (26.0, 28.0),
        ("vision", "optimizer"): (28.0, 29.0),
        ("llm", "grad_sync"): (15.0, 16.0),
        ("llm", "optimizer"): (16.0, 16.5),
    }
    assert {at: (row["start_s"], row["end_s"]) for at, row in again.iterrows()} == expected


def test_the_timeline_of_another_program_is_refused() -> None:
    with pytest.raises(UserError, match="for a different program"):
        replay(measured(2).program, timeline_frame(measured(1)))
