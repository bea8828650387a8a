"""Measured durations on the simulated clock, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.base.errors import UserError
from entrain_bench.program.table import timeline_frame
from entrain_bench.program.timeline import Timeline
from entrain_bench.simulate.replay import replay
from support.builders import chain_layout, tiny_model, uniform_batch

MODEL = tiny_model(encoder=2, llm=2)


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
