"""LPT with equal counts against brute force and hand-worked cases."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.lpt import balanced_groups
from entrain_bench.base.arrays import FloatArray


def best_makespan(size: FloatArray, groups: int, capacity: int) -> float:
    """Least heaviest group over every way to deal the samples out, capacity samples each."""
    if groups == 1:
        return float(size.sum())
    rest = range(1, len(size))
    best = np.inf
    for others in combinations(rest, capacity - 1):
        chosen = [0, *others]
        left = np.delete(size, chosen)
        best = min(best, max(float(size[chosen].sum()), best_makespan(left, groups - 1, capacity)))
    return best


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 3), st.integers(1, 3))
def test_lpt_with_equal_counts_is_within_its_bound(seed: int, groups: int, capacity: int) -> None:
    size = np.random.default_rng(seed).pareto(1.0, groups * capacity)
    group = balanced_groups(size, groups)
    assert np.bincount(group, minlength=groups).tolist() == [capacity] * groups
    # Two a group: optimal. Three a group: 4/3 - 1/(3 m) (Kellerer and Woeginger, 1993).
    bound = 1.0 if capacity <= 2 else 4 / 3 - 1 / (3 * groups)
    got = np.bincount(group, weights=size).max()
    assert got <= bound * best_makespan(size, groups, capacity) * (1 + 1e-12)


def test_lpt_by_hand_and_samples_without_work_are_dealt_out() -> None:
    # 9 -> 0, 7 -> 1, 6 -> 1 (full at two), 1 -> 0.
    assert balanced_groups(np.array([1.0, 6.0, 9.0, 7.0]), 2).tolist() == [0, 1, 0, 1]
    assert balanced_groups(np.zeros(4), 2).tolist() == [0, 1, 0, 1]


def test_equal_loads_go_to_the_first_group_with_room_if_so_asked() -> None:
    assert balanced_groups(np.zeros(4), 2, fewest_first=False).tolist() == [0, 0, 1, 1]
    # 9 -> 0, 7 -> 1, then two without work to the lighter one, which is full at two.
    assert balanced_groups(np.array([9.0, 7.0, 0.0, 0.0]), 2, fewest_first=False).tolist() == [0, 1, 1, 0]


def test_what_groups_have_already_counts() -> None:
    assert balanced_groups(np.array([1.0, 2.0]), 2, np.array([5.0, 0.0])).tolist() == [0, 1]
    assert balanced_groups(np.array([1.0, 2.0]), 2).tolist() == [1, 0]
