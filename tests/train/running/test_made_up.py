"""Made-up features: the same rows in any company, on any device, and as random as they are said to be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from entrain_bench.train.running import data as data_module
from entrain_bench.train.running.content import row_keys
from entrain_bench.train.running.data import made_up_features

WIDTH = 1176
# Chances below which a test of randomness fails; seeds are fixed, so it fails always or never.
UNLIKELY = 1e-4


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


def test_keys_are_splitmix64_of_seed_sample_number_and_row() -> None:
    def mixed(value: int) -> int:
        value = (value + 0x9E3779B97F4A7C15) % 2**64
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    # The first numbers of the generator that starts at 0, as its authors' C code prints them.
    assert mixed(0) == 0xE220A8397B1DCDAF
    keys = row_keys(7, np.array([11, 2**40]), np.array([0, 3]), np.array([2, 1])).view(np.uint64).ravel().tolist()
    of = [mixed(mixed(mixed(7) ^ sample) ^ number) for sample, number in ((11, 0), (2**40, 3))]
    assert keys == [mixed(of[0]), mixed(of[0] ^ 1), mixed(of[1])]


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


def test_no_item_has_rows_of_another() -> None:
    seeds, samples, numbers = np.meshgrid(range(3), range(50), range(20), indexing="ij")
    keys = np.concatenate(
        [
            row_keys(s, a.ravel(), n.ravel(), np.full(a.size, 8))
            for s, a, n in zip(range(3), samples, numbers, strict=True)
        ]
    )
    assert len(np.unique(keys.view(np.uint64))) == 8 * seeds.size


@pytest.fixture(scope="module")
def made() -> NDArray[np.float64]:
    """Rows of two items of sample 1, one of sample 2, one of sample 3 and one of another seed ``[5, 200, WIDTH]``."""
    own = features(0, [1, 1, 2, 3], [0, 1, 0, 0], [200] * 4)
    return torch.cat([own, features(1, [1], [0], [200])]).double().numpy().reshape(5, 200, WIDTH)


def chance(left: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    """How likely independent numbers of mean 0 and variance 1 are as correlated as these."""
    return float(2 * stats.norm.sf(abs((left * right).mean() * np.sqrt(left.size))))


def test_numbers_are_uniform_with_mean_0_and_variance_1(made: NDArray[np.float64]) -> None:
    assert np.abs(made).max() <= 3**0.5
    assert abs(made.mean()) < 4 / np.sqrt(made.size)
    # The variance of a uniform number's square is 4 / 5.
    assert abs(made.var() - 1) < 4 * np.sqrt(0.8 / made.size)
    assert stats.kstest(made.ravel() / 3**0.5, stats.uniform(-1, 2).cdf).pvalue > UNLIKELY
    bits = np.rint(made * 2**23 / 3**0.5).astype(np.int64)
    for bit in range(1, 24):
        share = float((bits >> bit & 1).mean())
        assert abs(share - 0.5) < 4 * 0.5 / np.sqrt(bits.size), bit


def test_neighbours_are_not_correlated(made: NDArray[np.float64]) -> None:
    pairs = {
        "columns": (made[..., 1:], made[..., :-1]),
        "second next columns": (made[..., 2:], made[..., :-2]),
        "rows": (made[:, 1:], made[:, :-1]),
        "items of a sample": (made[0], made[1]),
        "samples": (made[2], made[3]),
        "seeds": (made[0], made[4]),
        "diagonals": (made[:, 1:, 1:], made[:, :-1, :-1]),
        "squares of columns": tuple((rows**2 - 1) / 0.8**0.5 for rows in (made[..., 1:], made[..., :-1])),
    }
    for name, (left, right) in pairs.items():
        assert chance(left, right) > UNLIKELY, name


def test_neighbours_fill_the_square_evenly(made: NDArray[np.float64]) -> None:
    for left, right in ((made[..., 1:], made[..., :-1]), (made[:, 1:], made[:, :-1])):
        counts, *_ = np.histogram2d(left.ravel(), right.ravel(), bins=32, range=2 * [[-(3**0.5), 3**0.5]])
        assert stats.chisquare(counts.ravel()).pvalue > UNLIKELY


def test_no_two_rows_or_columns_go_together(made: NDArray[np.float64]) -> None:
    rows = made.reshape(-1, WIDTH)
    for table in (rows, rows.T):
        size = len(table)
        found = np.corrcoef(table)[np.triu_indices(size, 1)] * np.sqrt(table.shape[1])
        assert found.std() == pytest.approx(1, abs=0.01)
        assert 2 * stats.norm.sf(np.abs(found).max()) * len(found) > UNLIKELY


def test_numbers_that_are_not_mixed_show(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_FIRST", "_SECOND"):
        monkeypatch.setattr(data_module, name, 1)
    rows = features(0, [1], [0], [200]).double().numpy()
    with pytest.raises(AssertionError):
        test_neighbours_fill_the_square_evenly(rows)
    with pytest.raises(AssertionError):
        test_no_two_rows_or_columns_go_together(rows)


def test_shifts_that_bring_in_the_sign_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_module, "_UPPER_16", -1)
    with pytest.raises(AssertionError):
        test_rows_are_those_of_unsigned_arithmetic()
