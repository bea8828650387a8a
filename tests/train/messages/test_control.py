"""Waits that take too long name the setting that limits them."""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest

from entrain_bench.balancing.recomputation import recompute_all
from entrain_bench.base.errors import ExecutionError
from entrain_bench.program.layout import layout_from_json, layout_to_json
from entrain_bench.train.messages.control import named_wait, program_from_bytes, program_to_bytes
from support.builders import random_samples
from support.train.four_ranks import LAYOUTS, MODEL, programs


@pytest.mark.parametrize(
    ("raised", "line"),
    [
        (
            RuntimeError("[gloo/buffer.cc:81] Timed out waiting 3000ms\nfor recv operation"),
            "rank 0: waited longer than harness.timeout_s=3 s for another rank ([gloo/buffer.cc:81] Timed out waiting "
            "3000ms for recv operation)",
        ),
        (RuntimeError("Connection closed by peer"), "Connection closed by peer"),
        (ExecutionError("rank 1: timed out"), "rank 1: timed out"),
    ],
)
def test_waits_that_are_too_long_are_named(raised: Exception, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RuntimeError) as error, named_wait("harness.timeout_s", 3.0):
        raise raised
    assert str(error.value) == line
    assert isinstance(error.value, ExecutionError) == ("rank" in line)


def test_programs_and_layouts_travel_whole() -> None:
    rng = np.random.default_rng(1)
    layout = layout_from_json(layout_to_json(LAYOUTS["fan_in"]))
    assert layout_to_json(layout) == layout_to_json(LAYOUTS["fan_in"])
    program = programs(random_samples(rng, 10), layout, rng, split=False)
    again = program_from_bytes(program_to_bytes(program), MODEL, layout, program.shapes)
    assert program_to_bytes(again) == program_to_bytes(program)
    np.testing.assert_array_equal(again.lane_actions, program.lane_actions)
    assert [len(c) for c in again.chunks] == [len(c) for c in program.chunks]
    assert again.remade == ()
    frugal = recompute_all(program)
    again = program_from_bytes(program_to_bytes(frugal), MODEL, layout, program.shapes)
    assert [own.tolist() for own in again.remade] == [own.tolist() for own in frugal.remade]


def test_objects_neither_leave_nor_arrive() -> None:
    rng = np.random.default_rng(1)
    program = programs(random_samples(rng, 10), LAYOUTS["fan_in"], rng, split=False)
    with pytest.raises(ValueError, match="allow_pickle"):
        program_to_bytes(replace(program, kind=np.array([object()])))
    pickled = BytesIO()
    np.savez(pickled, **{"columns.first_action": np.array([object()])})
    with pytest.raises(ValueError, match="allow_pickle"):
        program_from_bytes(pickled.getvalue(), MODEL, program.layout, program.shapes)
