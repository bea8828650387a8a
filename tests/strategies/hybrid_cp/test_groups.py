"""Megatron-LM's choosers of context-parallel groups, against outputs of its own functions and on random batches."""

from __future__ import annotations

import numpy as np
import pytest

from entrain_bench_strategies.hybrid_cp import (
    Group,
    dev_rounds,
    filled,
    main_rounds,
    number_rounds,
)

# Lengths, then the work of each of four ranks of capacity 4 in every round: of main (d98e8a64) and of dev (d48bd6be).
ORACLES = [
    ([8, 4, 4], [[32, 32, 16, 16]], [[32, 32, 16, 16]]),
    ([16, 4], [[64] * 4, [4] * 4], [[64] * 4, [4] * 4]),
    ([16, 8, 4, 4, 4, 4], [[64] * 4, [32] * 4], [[64] * 4, [32, 32, 16, 16], [8] * 4]),
    ([12, 4], [[36] * 4, [4] * 4], [[40] * 4]),
    ([4] * 8, [[32] * 4], [[16] * 4, [16] * 4]),
]


def work(lengths: list[int], rounds: list[list[Group]]) -> list[list[float]]:
    """Squared lengths over widths, of each rank."""
    return [
        [
            sum(lengths[sample] ** 2 / group.width for sample in group.samples)
            for group in own
            for _ in range(group.width)
        ]
        for own in rounds
    ]


@pytest.mark.parametrize(("lengths", "main", "dev"), ORACLES)
def test_the_smallest_batches_are_grouped_as_megatron_does(
    lengths: list[int], main: list[list[float]], dev: list[list[float]]
) -> None:
    assert work(lengths, main_rounds(np.array(lengths), 4, 4)) == main
    assert work(lengths, dev_rounds(np.array(lengths), 4, 4)) == dev


def test_idle_ranks_go_to_the_first_of_the_narrowest_groups() -> None:
    assert filled(np.array([2, 1]), 8).tolist() == [4, 4]
    assert filled(np.array([4, 1, 1]), 8).tolist() == [4, 2, 2]
    assert filled(np.array([4, 1, 1, 1]), 8).tolist() == [4, 2, 1, 1]


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
def test_random_batches_lose_no_sample_and_leave_no_rank_idle(num_ranks: int) -> None:
    rng = np.random.default_rng(num_ranks)
    for _ in range(100):
        lengths = np.ceil(np.minimum(rng.lognormal(4, 1.5, rng.integers(1, 40)), 64 * num_ranks)).astype(np.int64)
        for choose in (dev_rounds, main_rounds):
            rounds = choose(lengths, num_ranks, 64)
            assert sorted(sample for own in rounds for group in own for sample in group.samples) == [
                *range(len(lengths))
            ]
            for own in rounds:
                assert sum(group.width for group in own) == num_ranks
                assert all(group.samples for group in own)
                for group in own:
                    assert all(lengths[sample] <= 64 * group.width for sample in group.samples)
                    if choose is dev_rounds:
                        assert lengths[group.samples].sum() <= 64 * group.width
            made = number_rounds(rounds, len(lengths), one_pack=choose is dev_rounds)
            assert not np.any(made.first % made.width)
            # No two groups of a round overlap, and in main no two samples of a group run at once.
            busy = np.zeros((made.number.max() + 1, num_ranks), np.int64)
            packs = {*zip(made.number.tolist(), made.first.tolist(), made.width.tolist(), strict=True)}
            for number, first, width in packs:
                busy[number, first : first + width] += 1
            assert busy.max() == 1
            if choose is main_rounds:
                assert len(packs) == len(lengths)
