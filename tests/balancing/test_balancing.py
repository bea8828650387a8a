"""Longest first: hand-worked, within Graham's bound of the best, row by row; places of arrival."""

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.lpt import arrival_places, longest_first_by_row
from support.builders import as_ints


def loads(cost: np.ndarray, bins: np.ndarray, count: int) -> np.ndarray:
    return np.bincount(bins, weights=cost, minlength=count)


def test_a_row_by_hand() -> None:
    # 7 and 6 open the bins; 5 joins 6, 4 joins 7, and 3, as they are equal, the first.
    assert longest_first_by_row(np.array([3.0, 7, 5, 4, 6]), np.zeros(5, np.int64), 2).tolist() == [0, 0, 1, 0, 1]


def test_rows_are_dealt_out_apart_and_ties_go_by_index() -> None:
    bins = longest_first_by_row(np.ones(7), as_ints([1, 0, 1, 0, 1, 0, 1]), 3)
    assert bins.tolist() == [0, 0, 1, 1, 2, 2, 0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_the_fullest_bin_is_within_grahams_bound_of_the_best(cost: list[int], count: int) -> None:
    found = loads(
        np.array(cost, float), longest_first_by_row(np.array(cost, float), np.zeros(len(cost), np.int64), count), count
    )
    best = min(
        max(loads(np.array(cost, float), np.array(each), count)) for each in product(range(count), repeat=len(cost))
    )
    assert best <= found.max() <= (4 / 3 - 1 / (3 * count)) * best + 1e-9


def test_microbatches_of_arrival_go_round_the_replicas() -> None:
    replica, microbatch = arrival_places(8, 2, 2)
    assert replica.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert microbatch.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    # Four replicas with a sample each, where two would have two.
    assert arrival_places(4, 2, 4)[0].tolist() == [0, 1, 2, 3]
