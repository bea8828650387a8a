"""Repetitions: how many are enough, and the interval of their median."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from entrain_bench.run.cells import compose_cells
from entrain_bench.specs.model import ModelSpec
from entrain_bench.train.measuring import Clock
from entrain_bench.train.profiling.timing import (
    DEPTH,
    WARM_UPS,
    Patience,
    longest_of,
    packs_of,
    precision_of,
    sample,
    split_tokens,
    targets_of,
)

CPU = torch.device("cpu")


class Turns:
    """Takes the given seconds, the last of them again and again."""

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.calls = seconds, 0

    def __call__(self, clock: Clock) -> None:
        wanted = self.seconds[min(self.calls, len(self.seconds) - 1)]
        self.calls += 1
        for part in range(2):
            with clock.action(part):
                time.sleep(wanted)


def test_the_interval_of_the_median_is_between_its_ranks() -> None:
    # Of 1 to 100 the ranks 50 -+ 9.8, rounded outwards: 41st to 61st value.
    assert precision_of(np.arange(1.0, 101)) == pytest.approx((61 - 41) / 2 / 50.5)
    assert precision_of(np.full(9, 2.0)) == 0.0


def test_equal_repetitions_are_enough_after_the_least_number() -> None:
    turns = Turns(0.002)
    rows = sample(turns, CPU, Patience(4, 50, 0.9, 10.0))
    assert rows.shape == (4, 2)
    assert turns.calls == WARM_UPS + 4
    assert (rows >= 0.002).all()


def test_unsteady_ones_are_repeated_to_the_most() -> None:
    turns = Turns(*[0.0001, 0.004] * 10)
    assert len(sample(turns, CPU, Patience(3, 9, 1e-6, 10.0))) == 9


def test_slow_ones_end_with_their_time_and_are_hardly_warmed_up() -> None:
    turns = Turns(0.03)
    rows = sample(turns, CPU, Patience(5, 50, 1e-6, 0.1))
    assert len(rows) <= 3
    assert turns.calls == 1 + len(rows)


VISION, LLM = ModelSpec.from_config(compose_cells(["model=tiny"])[0].config.model).modules


def test_lengths_are_in_proportion_of_odd_numbers() -> None:
    assert split_tokens(64, 4) == (4, 12, 20, 28)
    assert split_tokens(10, 3) == (1, 3, 6)


@given(tokens=st.integers(1, 10_000), share=st.floats(0, 1))
def test_lengths_are_positive_and_add_up(tokens: int, share: float) -> None:
    number = 1 + int(share * (tokens**0.5 - 1))
    lengths = split_tokens(tokens, number)
    assert len(lengths) == number
    assert sum(lengths) == tokens
    assert min(lengths) >= 1
    assert longest_of(tokens, number) == lengths[-1] == max(lengths)


def test_every_kind_is_a_target_and_blocks_are_stacked() -> None:
    assert [(t.kind, t.depths) for t in targets_of(VISION, 2)] == [
        ("embed", (1,)),
        ("window_block", (1, DEPTH)),
        ("block", (1, DEPTH)),
        ("head", (1,)),
    ]


def test_only_blocks_are_timed_for_several_context_parallel_ranks() -> None:
    assert [(t.kind, t.cp) for t in targets_of(VISION, 2, 4)] == [("window_block", 4), ("block", 4)]


def test_blocks_take_one_a_few_and_many_sequences_and_ends_one() -> None:
    embed, block, head = targets_of(LLM, 1)
    assert [len(lengths) for lengths in packs_of(block, 256)] == [1, 4, 16]
    assert [len(lengths) for lengths in packs_of(block, 1)] == [1]
    assert [*packs_of(embed, 256)] == [*packs_of(head, 256)] == [(256,)]


@pytest.mark.parametrize(("context", "numbers"), [(8192, [16, 256]), (1023, [128, 256]), (100, [])])
def test_no_sequence_is_longer_than_the_context(context: int, numbers: list[int]) -> None:
    short = replace(LLM, config=replace(LLM.config, context_tokens=context))
    packs = [*packs_of(targets_of(short, 1)[1], 65536)]
    assert [len(lengths) for lengths in packs] == numbers
    assert all(max(lengths) <= context for lengths in packs)
