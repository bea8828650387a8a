"""Values in two parts: bit for bit the same when they are put together."""

from __future__ import annotations

from pickle import UnpicklingError

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.train.modules import Pack
from entrain_bench.train.producing.outline import ALIGNMENT, Outline, parts_of
from entrain_bench.train.running.data import Inputs

DTYPES = st.sampled_from([torch.uint8, torch.int64, torch.float32, torch.bfloat16, torch.bool])
TENSORS = st.builds(
    lambda dtype, shape, seed: torch.from_numpy(np.random.default_rng(seed).integers(0, 2, shape)).to(dtype),
    DTYPES,
    st.lists(st.integers(0, 5), max_size=3),
    st.integers(0, 9),
)
VALUES = st.recursive(TENSORS | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=4))


def there_and_back(value: object, spare: int = 0) -> object:
    parts = parts_of(value)
    memory = torch.full((parts.outline.end + spare,), 255, dtype=torch.uint8)
    parts.write(memory)
    return Outline(parts.outline.begin, parts.outline.end).fill(memory)


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor)
        return one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, list):
        assert isinstance(other, list)
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@settings(max_examples=40, deadline=None)
@given(VALUES, st.integers(0, 100))
def test_values_come_back(value: object, spare: int) -> None:
    assert same(value, there_and_back(value, spare))


def test_inputs_come_back_with_their_tensors_in_the_memory() -> None:
    features = torch.randn(6, 4)[::2].t()
    inputs = Inputs(Pack((3, 1), (1,), torch.arange(4), torch.arange(4) - 1, grids=((1, 3), (0, 0))), features)
    parts = parts_of(inputs)
    assert [offset % ALIGNMENT for offset, _ in parts.tensors] == [0, 0, 0]
    assert len(parts.rest) < 1000
    memory = torch.zeros(parts.outline.end, dtype=torch.uint8)
    parts.write(memory)
    back = parts.outline.fill(memory)
    assert torch.equal(back.features, features)
    assert torch.equal(back.pack.token_ids, torch.arange(4))
    assert (back.pack.lengths, back.pack.grids) == ((3, 1), ((1, 3), (0, 0)))
    memory.zero_()
    assert not back.features.any()


@pytest.mark.parametrize("value", [torch.zeros(100), tuple(range(100))])
def test_memory_that_is_too_small_is_an_error(value: object) -> None:
    parts = parts_of(value)
    memory = torch.zeros(parts.outline.end, dtype=torch.uint8)
    parts.write(memory)
    with pytest.raises((RuntimeError, ValueError)):
        parts.write(memory[:10])
    with pytest.raises((EOFError, UnpicklingError)):
        parts.outline.fill(memory[:-1])
