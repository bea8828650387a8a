"""Microbatches of ranks: what an assignment says, and as many on every rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrain_bench.base.errors import UserError
from entrain_bench.sampler.microbatches import as_assignment, deal, split
from support.builders import labels, rngs, samples, tiny_model


def test_ranks_get_their_microbatches_in_order_and_samples_in_order_of_arrival() -> None:
    dealt = deal(labels([1, 0, 1, 0, 1], [4, 0, 2, 0, 4]), 2)
    assert dealt == (((1, 3),), ((2,), (0, 4)))


@pytest.mark.parametrize("counts", ["fixed", "equal"])
def test_ranks_with_fewer_microbatches_split_those_with_most_samples(counts: str) -> None:
    dealt = deal(labels([0, 0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1, 2]), 2, counts, 3)
    assert dealt == (((0, 1), (2,), (3, 4)), ((5,), (6,), (7,)))


def test_of_equally_large_microbatches_the_first_is_split() -> None:
    assert split([(0, 1), (2, 3)], 3) == [(0,), (1,), (2, 3)]
    assert split([(0, 1)], 0) == [(0, 1)]


@given(rngs, st.integers(1, 4), st.integers(1, 6))
def test_splitting_loses_no_sample_and_levels_sizes(rng: np.random.Generator, num_ranks: int, count: int) -> None:
    size = num_ranks * count * 3
    replica = np.arange(size) % num_ranks
    dealt = deal(labels(replica, rng.integers(0, count, size)), num_ranks, "fixed", count)
    for rank, rows in enumerate(dealt):
        assert len(rows) == count
        assert all(rows)
        assert sorted(index for row in rows for index in row) == np.flatnonzero(replica == rank).tolist()


@pytest.mark.parametrize(
    ("replica", "microbatch", "counts", "message"),
    [
        ([0, 0], [0, 1], "assigned", "rank 1 received no sample of a global batch"),
        (
            [0, 1, 1],
            [0, 0, 1],
            "equal",
            r"rank 0 has 1 samples in 1 microbatches, which cannot be split into 2. .*counts=assigned",
        ),
        (
            [0, 0, 1],
            [0, 1, 0],
            "fixed",
            r"rank 0 has 2 samples in 2 microbatches, which cannot be split into 1. .*counts=equal",
        ),
    ],
)
def test_what_cannot_be_dealt_is_one_line(replica: list[int], microbatch: list[int], counts: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        deal(labels(replica, microbatch), 2, counts, 1)


def test_every_module_runs_on_the_samples_of_a_microbatch() -> None:
    model, shapes = tiny_model(), samples((5, [8, 8]), (5, []), (5, [4]))
    dealt = deal(labels([0, 1, 1], [0, 1, 0]), 2)
    vision, llm = as_assignment(dealt, model, shapes).modules
    assert (llm.replica.tolist(), llm.microbatch.tolist()) == ([0, 1, 1], [0, 1, 0])
    assert (vision.replica.tolist(), vision.microbatch.tolist()) == ([0, 0, 1], [0, 0, 0])
