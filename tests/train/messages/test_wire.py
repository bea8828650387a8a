"""Values, programs and layouts as bytes: they come back whole, without code that runs."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.recomputation import recompute_all
from entrain_bench.program.layout import layout_from_json, layout_to_json
from entrain_bench.train.messages.wire import (
    ALIGNMENT,
    from_bytes,
    parts_of,
    program_from_bytes,
    program_to_bytes,
    to_bytes,
    value_in,
)
from support.builders import random_samples
from support.train.four_ranks import LAYOUTS, MODEL, programs


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


ARRAYS = st.builds(
    lambda dtype, shape, seed: np.random.default_rng(seed).integers(0, 2, shape).astype(dtype),
    st.sampled_from(["u1", "i4", "i8", "f4", "f8", "?"]),
    st.lists(st.integers(0, 5), max_size=3),
    st.integers(0, 9),
)
VALUES = st.recursive(
    ARRAYS | st.integers() | st.text(max_size=5) | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


def same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray):
        assert isinstance(other, np.ndarray)
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, list | dict):
        assert type(one) is type(other)
        assert len(one) == len(other)
        return all(map(same, one.values(), other.values()) if isinstance(one, dict) else map(same, one, other))
    return one == other


@settings(max_examples=40, deadline=None)
@given(VALUES, st.integers(0, 100))
def test_values_come_back(value: object, spare: int) -> None:
    assert same(value, from_bytes(to_bytes(value)))
    parts = parts_of(value)
    memory = np.full(parts.size + spare, 255, np.uint8)
    parts.write(memory)
    assert same(value, value_in(memory))


def test_arrays_lie_in_the_memory() -> None:
    features = torch.randn(6, 4)[::2].t()
    parts = parts_of({"features": features, "ids": np.arange(4)})
    assert [offset % ALIGNMENT for offset, _ in parts.arrays] == [0, 0]
    memory = np.zeros(parts.size, np.uint8)
    parts.write(memory)
    back = value_in(memory)
    assert np.array_equal(back["features"], features.numpy())
    assert back["ids"].tolist() == [0, 1, 2, 3]
    memory[:] = 0
    assert not back["features"].any()


@pytest.mark.parametrize("value", [np.zeros(100), [*range(100)]])
def test_memory_that_is_too_small_is_an_error(value: object) -> None:
    parts = parts_of(value)
    memory = np.zeros(parts.size, np.uint8)
    with pytest.raises((ValueError, TypeError)):
        parts.write(memory[:10])
    parts.write(memory)
    with pytest.raises((ValueError, TypeError)):
        value_in(memory[:-1])


def test_objects_neither_leave_nor_arrive() -> None:
    with pytest.raises(AssertionError, match="no array of numbers"):
        to_bytes({"a": object()})
    content = to_bytes(np.arange(4))
    with pytest.raises(TypeError):
        from_bytes(content.replace(json.dumps("<i8").encode(), b'"|O" '))
