"""Costs of units, padded batches against brute force, and batches on nodes against every permutation."""

from __future__ import annotations

from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench_strategies.orchmllm import cut_padded, place_batches
from support.builders import as_ints, tiny_model

LLM = tiny_model().llm


def dearest(rising: np.ndarray, batch: np.ndarray) -> float:
    """Cost of the dearest padded batch: its units times the dearest of them."""
    return max((np.sum(batch == one) * rising[batch == one].max() for one in np.unique(batch)), default=0.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(1, 3))
def test_padded_batches_are_the_best_cuts(lengths: list[int], count: int) -> None:
    rising = np.sort(np.array(lengths, float), kind="stable")
    batch = cut_padded(rising, count)
    assert batch.max() < count
    cuts = (cut for most in range(count) for cut in combinations(range(1, len(rising)), most))
    best = min(dearest(rising, np.searchsorted(np.array(cut), np.arange(len(rising)), side="right")) for cut in cuts)
    assert dearest(rising, batch) == pytest.approx(best, rel=1e-9)


def stays(replica: np.ndarray, home: np.ndarray, tokens: np.ndarray, node: np.ndarray) -> tuple[int, int]:
    """Tokens that stay on their node, and on their replica."""
    return int(tokens[node[replica] == node[home]].sum()), int(tokens[replica == home].sum())


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_batches_are_placed_as_well_as_any_permutation_places_them(data: st.DataObject) -> None:
    node = as_ints(data.draw(st.sampled_from([[0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 2, 3], [0, 1, 1, 2]])))
    count = data.draw(st.integers(1, 8))
    draws = st.lists(st.integers(0, 3), min_size=count, max_size=count)
    batch, home = as_ints(data.draw(draws)), as_ints(data.draw(draws))
    tokens = as_ints(data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)))
    row = np.zeros(count, np.int64)
    replica = place_batches(row, batch, home, tokens, node)
    for one in np.unique(batch):
        assert len(np.unique(replica[batch == one])) == 1
    assert len(np.unique(replica)) == len(np.unique(batch))
    best = max(stays(np.array(order)[batch], home, tokens, node) for order in permutations(range(4)))
    assert stays(replica, home, tokens, node) == best
