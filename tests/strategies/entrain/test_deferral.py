"""Pairwise deferral of Entrain's Algorithm 3: its parts against brute force, and what it must keep."""

from __future__ import annotations

from itertools import chain, combinations, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench_strategies.entrain.assigner import (
    bottleneck_matching,
    defer_pairwise,
    falling_order,
    maximum_matching,
    nearest_reachable,
    select_members,
    subset_sums,
)
from support.builders import as_ints

positive_work = st.floats(0.01, 10.0, allow_nan=False).map(lambda value: round(value, 3))


# d. Subsets


def all_subsets(count: int) -> list[tuple[int, ...]]:
    return list(chain.from_iterable(combinations(range(count), size) for size in range(count + 1)))


@settings(max_examples=120, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=9), st.lists(st.integers(0, 70), min_size=1, max_size=4))
def test_the_chosen_subset_is_the_nearest_of_all(sizes: list[int], targets: list[int]) -> None:
    array = as_ints(sizes)
    weights = np.sqrt(array + 0.5)
    last, weight = subset_sums(array, weights)
    sums = {sum(sizes[i] for i in subset) for subset in all_subsets(len(sizes))}
    assert {total for total in range(len(last)) if last[total] != -1} == sums
    for target in targets:
        total = nearest_reachable(last, target)
        distance = min(abs(target - other) for other in sums)
        assert abs(target - total) == distance
        assert total == min(other for other in sums if abs(target - other) == distance)
        members = select_members(last, array, total).tolist()
        assert len(set(members)) == len(members)
        assert sum(sizes[i] for i in members) == total
        assert weight[total] == pytest.approx(sum(weights[i] for i in members))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4).map(float), min_size=1, max_size=12))
def test_microbatches_fall_and_equal_ones_stay_in_order(load: list[float]) -> None:
    assert falling_order(np.array(load)).tolist() == sorted(range(len(load)), key=lambda index: -load[index])


# e. Matching


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.floats(0.05, 0.9), st.integers(0, 2**32 - 1))
def test_as_many_rows_are_matched_as_can_be(rows: int, columns: int, density: float, seed: int) -> None:
    allowed = np.random.default_rng(seed).random((rows, columns)) < density
    column = maximum_matching(allowed)
    matched = np.flatnonzero(column >= 0)
    assert len(set(column[matched].tolist())) == len(matched)
    assert np.all(allowed[matched, column[matched]])
    assert len(matched) == np.count_nonzero(maximum_bipartite_matching(csr_array(allowed)) >= 0)


@pytest.mark.wide
@settings(max_examples=150, deadline=None)
@given(st.integers(1, 5), st.data())
def test_bottleneck_matching_is_the_best_of_all_matchings(size: int, data: st.DataObject) -> None:
    values = st.integers(0, 9).map(float)
    pair = np.array(data.draw(st.lists(st.lists(values, min_size=size, max_size=size), min_size=size, max_size=size)))
    alone = np.array(data.draw(st.lists(values, min_size=size, max_size=size)))
    matching = bottleneck_matching(pair, alone)
    best = min(max(min(alone[i], pair[i, partners[i]]) for i in range(size)) for partners in permutations(range(size)))
    assert matching.bottleneck == best
    assert sorted(matching.partner.tolist()) == list(range(size))
    for i in range(size):
        left = pair[i, matching.partner[i]] if matching.defers[i] else alone[i]
        assert left <= matching.bottleneck


# d to f. Deferral


def loads(microbatch: IntArray, llm: FloatArray, count: int) -> FloatArray:
    return np.bincount(microbatch, weights=llm, minlength=count)


def assert_deferral_is_sound(before: IntArray, llm_s: FloatArray, count: int, num_bins: int) -> None:
    encoder, llm = defer_pairwise(before, llm_s, count, num_bins)
    assert len(encoder) == len(llm) == len(before)
    # The encoder's microbatches are the old ones in another order.
    renamed = {(int(old), int(new)) for old, new in zip(before, encoder, strict=True)}
    assert len(renamed) == len({old for old, _ in renamed}) == len({new for _, new in renamed})
    assert set(encoder.tolist()) <= set(range(count))
    old, own, new = (loads(labels, llm_s, count) for labels in (before, encoder, llm))
    assert new.sum() == pytest.approx(old.sum())
    # Samples move only from the first of a pair to the second.
    moved = encoder != llm
    assert np.all(encoder[moved] % 2 == 0)
    assert np.all(llm[moved] == encoder[moved] + 1)
    if count % 2 and count > 1:
        assert not np.any(moved & (encoder == count - 1))
        assert not np.any(moved & (llm == count - 1))
    # Overloaded first: the heavier half, by falling load; the median unpaired at the end.
    half = count // 2
    falling = np.sort(old)[::-1]
    if half:
        assert np.allclose(own[0 : 2 * half : 2], falling[:half])
        assert np.allclose(np.sort(own[1 : 2 * half : 2])[::-1], falling[count - half :])
    if count % 2 and half:
        assert own[-1] == pytest.approx(falling[half])
    assert new.max() <= old.max() * (1 + 1e-9), "the heaviest LLM microbatch got heavier"


def spread(values: list[float], count: int, seed: int) -> IntArray:
    """Every microbatch gets a sample, the rest fall anywhere."""
    rng = np.random.default_rng(seed)
    return rng.permutation(np.concatenate([np.arange(count), rng.integers(0, count, len(values) - count)]))


@pytest.mark.wide
@settings(max_examples=200, deadline=None)
@given(st.lists(positive_work, min_size=1, max_size=30), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_deferral_moves_work_to_direct_successors_only_and_never_raises_the_maximum(
    values: list[float], count: int, seed: int
) -> None:
    count = min(count, len(values))
    assert_deferral_is_sound(spread(values, count, seed), np.array(values), count, num_bins=512)


@pytest.mark.parametrize("num_bins", [2, 8, 64, 512])
def test_deferral_never_raises_the_maximum_however_coarse_the_bins(num_bins: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        count = int(rng.integers(2, 7))
        values = rng.lognormal(0, 1, int(rng.integers(count, 40)))
        assert_deferral_is_sound(spread(values.tolist(), count, int(rng.integers(0, 2**32))), values, count, num_bins)
