"""A timeline as a table and as a trace, by hand."""

from __future__ import annotations

import numpy as np

from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.program.table import chrome_trace, timeline_frame
from entrain_bench.program.timeline import Timeline
from support.builders import chain_layout, tiny_model, uniform_batch

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
