"""Timelines as tables and traces, and parents of sub-microbatches by hand."""

from __future__ import annotations

import numpy as np
import pytest

from entrain_bench.balancing.schedules import chain_program, stages_behind, three_phase_program
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.table import chrome_trace, parent_microbatches, timeline_frame
from entrain_bench.program.timeline import Timeline
from support.builders import chain_layout, labels, samples, tiny_model, uniform_batch

MODEL = tiny_model(encoder=2, llm=2)


def timeline() -> Timeline:
    """Two microbatches on one encoder and one LLM stage; action n starts at n seconds and takes half of one."""
    layout = chain_layout(MODEL, 1, 1, 2)
    shapes, assignment = uniform_batch(MODEL, 2)
    program = chain_program(MODEL, shapes, layout, assignment, stages_behind(layout))
    start = np.arange(12.0)
    return Timeline(program, start, start + 0.5, start / 100, start / 1000, np.zeros(2))


def test_rows_are_lanes_in_order_with_their_labels_and_times() -> None:
    frame = timeline_frame(timeline())
    # Actions: encoder F0 F1 B0 B1, LLM F0 F1 B0 B1, then steps.
    expected = [
        *((0, "vision", 0, "forward", 0), (0, "vision", 1, "forward", 1), (0, "vision", 0, "backward", 2)),
        *((0, "vision", 1, "backward", 3), (0, "vision", -1, "grad_sync", 8), (0, "vision", -1, "optimizer", 10)),
        *((1, "llm", 0, "forward", 4), (1, "llm", 0, "backward", 6), (1, "llm", 1, "forward", 5)),
        *((1, "llm", 1, "backward", 7), (1, "llm", -1, "grad_sync", 9), (1, "llm", -1, "optimizer", 11)),
    ]
    columns = ["lane", "module", "microbatch", "pass", "start_s"]
    assert [*frame[columns].itertuples(index=False, name=None)] == expected
    assert frame["part"].tolist() == [0, 0, 0, 0, -1, -1] * 2
    assert frame["rank"].tolist() == [0] * 6 + [1] * 6
    assert np.allclose(frame["end_s"] - frame["start_s"], 0.5)
    assert np.allclose(frame["comm_s"], frame["start_s"] / 100)
    assert np.allclose(frame["transfer_wait_s"], frame["start_s"] / 1000)


def test_a_trace_names_ranks_and_counts_microseconds() -> None:
    events = chrome_trace(timeline_frame(timeline()))["traceEvents"]
    assert isinstance(events, list)
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["rank 0", "rank 1"]
    spans = {event["name"]: event for event in events if event["ph"] == "X" and event["tid"] == 1}
    assert [*spans] == ["forward llm 0", "backward llm 0", "forward llm 1", "backward llm 1", "grad_sync", "optimizer"]
    assert (spans["forward llm 1"]["ts"], spans["forward llm 1"]["dur"]) == (5e6, 0.5e6)
    assert {event["pid"] for event in spans.values()} == {0}


# Two images, one, none, one: units 0 to 3 of the encoder.
SHAPES = samples((10, [40, 80]), (10, [40]), (10, []), (10, [120]))


def program(encoder: list[int], llm: list[int], replicas: list[int] | None = None, dp: int = 1) -> Program:
    """Microbatches of the images and of the samples, all encoder forwards before the LLM's."""
    replicas = replicas or [0, 0, 0, 0]
    of_images = [replicas[sample] for sample in (0, 0, 1, 3)]
    assignment = Assignment((labels(of_images, encoder), labels(replicas, llm)))
    layout = chain_layout(MODEL, 1, 1, max(llm) + 1, dp=dp)
    return three_phase_program(MODEL, SHAPES, layout, assignment)


@pytest.mark.parametrize(
    ("encoder", "llm", "expected"),
    [
        # One microbatch of the LLM whose images are cut into three, and one with its own: places run on.
        ([0, 1, 2, 3], [0, 0, 1, 1], [0, 0, 0, 1]),
        # Images of one sample apart, and the second LLM microbatch without any.
        ([0, 1, 2, 3], [0, 0, 1, 2], [0, 0, 0, 2]),
        # The same microbatches.
        ([0, 0, 0, 1], [0, 0, 1, 1], [0, 1]),
        # The second encoder microbatch feeds two of the LLM's: not a part of either.
        ([0, 1, 1, 2], [0, 1, 1, 2], [0, 1, 2]),
    ],
)
def test_parents_by_hand(encoder: list[int], llm: list[int], expected: list[int]) -> None:
    made = program(encoder, llm)
    assert parent_microbatches(made, 0).tolist() == expected
    assert parent_microbatches(made, 1).tolist() == sorted({*llm})


def test_parts_of_a_deferred_microbatch_stay_one_microbatch() -> None:
    # Microbatch 0 of the encoder: sample 1 is deferred to the LLM's microbatch 1.
    assignment = Assignment((labels([0, 0, 0, 0], [0, 0, 0, 1]), labels([0, 0, 0, 0], [0, 1, 1, 1])))
    layout = chain_layout(MODEL, 1, 1, 2)
    made = chain_program(MODEL, SHAPES, layout, assignment, stages_behind(layout), split_backward=True)
    assert made.chunks[0].part.tolist() == [0, 1, 1]
    assert parent_microbatches(made, 0).tolist() == [0, 0, 1]


def test_what_feeds_another_replica_is_no_part() -> None:
    # Both images of sample 0 are encoded by replica 0, for the LLM's replica 1.
    vision, llm = labels([0, 0, 0, 1], [0, 1, 2, 0]), labels([1, 0, 0, 1], [0, 0, 0, 1])
    made = three_phase_program(MODEL, SHAPES, chain_layout(MODEL, 1, 1, 2, dp=2), Assignment((vision, llm)))
    assert parent_microbatches(made, 0).tolist() == [0, 1, 2, 0]
