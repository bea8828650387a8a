"""Made-up features: those of the published mixing functions, the same rows in any company and on any device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from entrain_bench.train.running import data as data_module
from entrain_bench.train.running.data import made_up_features, row_keys

WIDTH = 1176


def features(seed: int, samples: list[int], numbers: list[int], lengths: list[int], width: int = WIDTH) -> torch.Tensor:
    keys = row_keys(seed, np.array(samples), np.array(numbers), np.array(lengths))
    return made_up_features(torch.from_numpy(keys), width)


def by_hand(keys: NDArray[np.int32], width: int) -> NDArray[np.float32]:
    """The same in unsigned numbers of numpy, whose shifts bring in zeros."""

    def step(words: NDArray[np.uint32], shift: int, multiplier: int) -> NDArray[np.uint32]:
        return (words ^ (words >> np.uint32(shift))) * np.uint32(multiplier)

    columns = step(step(np.arange(width, dtype=np.uint32) * np.uint32(0x9E3779B9), 16, 0x7FEB352D), 16, 0x846CA68B)
    columns ^= columns >> np.uint32(16)
    first, second = keys.view(np.uint32)[:, :1], keys.view(np.uint32)[:, 1:]
    words = step(step(first + columns, 16, 0x7FEB352D) ^ second, 15, 0x846CA68B)
    whole = (words.view(np.int32) >> 8 | 1).astype(np.float32)
    return whole * np.float32(3**0.5 / 2**23)


def test_rows_are_those_of_unsigned_arithmetic() -> None:
    keys = row_keys(3, np.array([5, 6]), np.array([0, 9]), np.array([70, 80]))
    np.testing.assert_array_equal(made_up_features(torch.from_numpy(keys), WIDTH).numpy(), by_hand(keys, WIDTH))


@pytest.mark.wide
@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 50), st.integers(0, 9)), min_size=1, unique=True))
def test_rows_are_the_same_in_any_company(items: list[tuple[int, int, int]]) -> None:
    samples, numbers, lengths = (list(column) for column in zip(*items, strict=True))
    together = features(1, samples, numbers, lengths, width=5).split(lengths)
    backwards = features(1, samples[::-1], numbers[::-1], lengths[::-1], width=5).split(lengths[::-1])
    for index, rows in enumerate(together):
        alone = features(1, samples[index : index + 1], numbers[index : index + 1], lengths[index : index + 1], width=5)
        assert torch.equal(rows, alone)
        assert torch.equal(rows, backwards[-1 - index])


def test_rows_do_not_depend_on_how_many_are_made_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = features(0, [4], [1], [300])
    for at_once in (1, 7 * WIDTH, 2**40):
        monkeypatch.setattr(data_module, "_NUM_ON_CPU", at_once)
        assert torch.equal(features(0, [4], [1], [300]), expected)
    # A narrower row is the beginning of a wider one.
    assert torch.equal(features(0, [4], [1], [300], width=10), expected[:, :10])


@pytest.mark.parametrize(("name", "value"), [("_FIRST", 1), ("_SECOND", 1), ("_UPPER_16", -1), ("_UPPER_17", -1)])
def test_other_numbers_show(monkeypatch: pytest.MonkeyPatch, name: str, value: int) -> None:
    """Multipliers that mix nothing, and shifts that bring in the sign."""
    monkeypatch.setattr(data_module, name, value)
    with pytest.raises(AssertionError):
        test_rows_are_those_of_unsigned_arithmetic()
